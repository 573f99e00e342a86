// Tables, the numbers at the top, and the parts in their order.
PARTS.table = (s, host) => {
  const cell = (tag, v, kind) => make(tag, {
    className: kind === "text" ? "t" : kind === "shape" ? "s" : "n",
    ...(tag === "th" ? {
      scope: "col"
    } : {})
  }, v === null ? "" : tag === "th" ? v : WORDS[kind](v));
  const body = make("tbody", {}, ...s.rows.map(r => make("tr", {}, ...r.map((v, k) => cell("td", v, s.columns[k][1])))));
  const table = make("table", { className: s.sortable ? "sortable" : "" }, make("caption", {
    className: "unseen"
  }, s.heading), make("thead", {}, make("tr", {}, ...s.columns.map(c => cell("th", c[0], c[1])))), body);
  if (s.sortable) sortable(table, s.columns, s.rows);
  const inside = make("div", {
    className: "wrap",
    tabIndex: 0,
    role: "region",
    "aria-label": s.heading
  }, table);
  host.append(s.folded ? make("details", {}, make("summary", {}, s.folded), inside) : inside);
  return [];
};
// Heads of columns become buttons: numbers from the largest, text from A; once more, the other way round.
function sortable(table, columns, rows) {
  const body = table.tBodies[0],
    order = [...body.rows].map((row, i) => [row, rows[i]]),
    heads = [...table.tHead.rows[0].cells];
  heads.forEach((th, k) => {
    const text = th.textContent === "" ? "column " + (k + 1) : th.textContent;
    const button = make("button", { type: "button", className: "sort" }, text);
    th.replaceChildren(button);
    button.onclick = () => {
      const words = columns[k][1] === "text", was = th.getAttribute("aria-sort");
      const up = was ? was === "descending" : words;
      heads.forEach(h => h.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
      const by = (a, b) => words ? a[1][k].localeCompare(b[1][k], "en", { numeric: true }) : a[1][k] - b[1][k];
      order.sort((a, b) => up ? by(a, b) : by(b, a));
      body.append(...order.map(o => o[0]));
    };
  });
}
$("title").textContent = D.title;
$("about").textContent = D.about;
D.facts.forEach(([name, value, kind]) => {
  const d = make("dd", {}, value === null ? "none" : WORDS[kind](value));
  d.dataset.fact = name;
  $("facts").append(make("div", {}, make("dt", {}, name), d));
});
const draws = D.sections.flatMap((s, k) => {
  const host = make("section", {
    id: s.kind + k,
    className: s.kind === "table" ? "long" : ""
  }, ...(s.folded ? [] : [make("h2", {}, s.heading)]));
  if (s.said) host.append(make("p", {}, s.said));
  $("main").append(host);
  return PARTS[s.kind](s, host);
});
const first = [...document.querySelectorAll("section table")].find(t => !t.closest("details"));
if (first) {
  first.closest("section").tabIndex = -1;
  $("skip").setAttribute("href", "#" + first.closest("section").id);
}
const redraw = () => {
  paints = {};
  draws.forEach(f => f());
};
redraw();
addEventListener("resize", () => later(redraw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// Paper is white, whatever the screen is.
addEventListener("beforeprint", () => {
  document.documentElement.dataset.theme = "light";
  document.querySelectorAll("details").forEach(d => {
    d.open = true;
  });
  redraw();
});
addEventListener("afterprint", () => {
  delete document.documentElement.dataset.theme;
  redraw();
});
document.documentElement.dataset.ready = "true";