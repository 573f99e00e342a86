// One of the frontier's plans at a time: a slider, its numbers, what it does, and what differs from the plan compared.
PARTS.whatif = (s, host) => {
  const last = s.plans.length - 1;
  const slider = make("input", { type: "range", min: 0, max: last, step: 1, id: host.id + "-plan", disabled: !last });
  slider.value = 0;
  const chosen = make("output", {});
  chosen.setAttribute("for", slider.id);
  const name = make("label", { className: "choice" }, "Plan, from the least memory to the most ");
  name.setAttribute("for", slider.id);
  const facts = make("dl", {}), does = make("p", {}), changes = make("div", {});
  host.classList.add("whatif");
  host.append(name, slider, chosen, facts, does, changes);

  function show(k) {
    const p = s.plans[k], budget = size(p.facts[0][1]);
    slider.value = k;
    slider.setAttribute("aria-valuetext", `${budget}, plan ${k + 1} of ${last + 1}`);
    chosen.textContent = `budget ${budget} (plan ${k + 1} of ${last + 1})`;
    facts.replaceChildren(...p.facts.map(([heading, value, unit]) => {
      const d = make("dd", {}, WORDS[unit](value));
      d.dataset.plan = heading;
      return make("div", {}, make("dt", {}, heading), d);
    }));
    const said = p.does.map(([word, n, bytes]) => n === null ? word : `${n} ${word} (${size(bytes)})`).join(", ");
    does.textContent = (said || "Everything is kept") + ". " + (p.changed ?
      `${p.changed} tensors are treated otherwise than in ${s.base}:` :
      `No tensor is treated otherwise than in ${s.base}.`);
    changes.replaceChildren();
    if (p.changed) PARTS.table({ heading: "What differs", columns: s.columns, rows: p.changes }, changes);
  }
  slider.oninput = () => dispatchEvent(new CustomEvent("choose", { detail: +slider.value }));
  addEventListener("choose", e => show(e.detail));
  show(0);
  return [];
};
