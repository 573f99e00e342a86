// A canvas in a figure, which can be pointed at, zoomed, panned and read with keys. o is what it shows:
//   height (pixels, or a function that gives them), label, caption, view, left (pixels of the scale),
//   draw(g, w, h), mark(g, w, h, item) for what is pointed at, hit(px, py, time) -> item or -1, words(item),
//   count(), stride() items that an arrow key goes on; reveal(item), choose(item) where there is something to do,
//   and, where it has a second axis, rise: { low, high, bottom, top }.
function stage(host, o) {
  const canvas = make("canvas", {
    tabIndex: 0,
    role: "img",
    "aria-label": o.label
  });
  // What is pointed at is marked on a sheet of its own: nothing else need be drawn again.
  const glass = make("canvas", {
    className: "glass",
    "aria-hidden": "true"
  });
  host.append(make("figure", {}, make("div", {
    className: "stage"
  }, canvas, glass), make("figcaption", {}, ...[].concat(o.caption || []))));
  let mark = -1,
    from = null,
    w = 0,
    h = 0;

  function draw() {
    const r = devicePixelRatio || 1;
    w = canvas.clientWidth || 640;
    h = o.height instanceof Function ? o.height() : o.height;
    canvas.width = glass.width = Math.round(w * r);
    canvas.height = glass.height = Math.round(h * r);
    canvas.style.height = h + "px";
    canvas.style.aspectRatio = `${w} / ${h}`;
    const g = canvas.getContext("2d");
    g.scale(r, r);
    g.font = "12px system-ui, sans-serif";
    o.draw(g, w, h);
    point();
  }

  function point() {
    const g = glass.getContext("2d");
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, glass.width, glass.height);
    if (mark >= 0) {
      g.save();
      g.scale(glass.width / w, glass.height / h);
      o.mark(g, w, h, mark);
      g.restore();
    }
  }
  const time = px => o.view.a + (o.view.b - o.view.a) * (px - o.left) / (w - o.left - 4);

  function zoom(by, px = (w + o.left) / 2, py = h / 2) {
    const v = o.view,
      at = time(px),
      up = o.rise;
    if (up) {
      const spot = up.high - (up.high - up.low) * py / h;
      up.low = Math.max(up.bottom, spot - (spot - up.low) * by);
      up.high = Math.min(up.top, spot + (up.high - spot) * by);
    }
    reframe(v, at - (at - v.a) * by, at + (v.b - at) * by);
  }

  function pan(dx, dy) {
    const v = o.view,
      d = (v.b - v.a) * dx,
      up = o.rise;
    if (up) {
      const e = (up.high - up.low) * dy,
        m = Math.max(up.bottom - up.low, Math.min(up.top - up.high, e));
      up.low += m;
      up.high += m;
    }
    reframe(v, v.a + d, v.b + d);
  }

  function all() {
    if (o.rise) {
      o.rise.low = o.rise.bottom;
      o.rise.high = o.rise.top;
    }
    reframe(o.view, o.view.start, o.view.end);
  }

  function show(i, x, y) {
    if (i !== mark) {
      mark = i;
      later(point);
    }
    tip(i < 0 ? "" : o.words(i), x, y);
  }

  function read(i) {
    const n = o.count();
    if (!n) return;
    i = Math.max(0, Math.min(n - 1, i));
    if (o.reveal) o.reveal(i);
    const box = canvas.getBoundingClientRect();
    show(i, box.left + o.left, box.top + 8);
    $("said").textContent = o.words(i);
  }
  canvas.onpointerdown = e => {
    from = [e.clientX, e.clientY];
    canvas.setPointerCapture(e.pointerId);
  };
  canvas.onpointerup = () => {
    from = null;
  };
  canvas.onpointermove = e => {
    if (from && e.buttons) {
      pan((from[0] - e.clientX) / (w - o.left), (e.clientY - from[1]) / h);
      from = [e.clientX, e.clientY];
      return tip("");
    }
    show(o.hit(e.offsetX, e.offsetY, time(e.offsetX)), e.clientX, e.clientY);
  };
  canvas.onpointerleave = () => {
    from = null;
    show(-1);
  };
  canvas.onblur = () => show(-1);
  canvas.onclick = e => {
    const i = o.hit(e.offsetX, e.offsetY, time(e.offsetX));
    if (i >= 0 && o.choose) o.choose(i);
  };
  // The wheel scrolls the page until the picture is clicked or Ctrl is held.
  canvas.addEventListener("wheel", e => {
    if (document.activeElement !== canvas && !e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    zoom(e.deltaY > 0 ? 1.2 : 1 / 1.2, e.offsetX, e.offsetY);
  }, {
    passive: false
  });
  canvas.onkeydown = e => {
    const way = {
        ArrowLeft: [-.1, 0],
        ArrowRight: [.1, 0],
        ArrowUp: [0, .1],
        ArrowDown: [0, -.1]
      } [e.key],
      one = e.shiftKey ? 1 : o.stride ? o.stride() : 1;
    if (way && (o.rise || way[1])) pan(...way);
    else if (e.key === "ArrowLeft" || e.key === "ArrowRight") read(mark + (mark < 0 ? 1 : one * Math.sign(way[0])));
    else if (e.key === "n" || e.key === "p") read(mark + (e.key === "n" ? 1 : -1));
    else if (e.key === "Home") read(0);
    else if (e.key === "End") read(o.count() - 1);
    else if (e.key === "+" || e.key === "=") zoom(1 / 1.4);
    else if (e.key === "-") zoom(1.4);
    else if (e.key === "0") all();
    else if (e.key === "Enter" && mark >= 0 && o.choose) o.choose(mark);
    else if (e.key === "Escape") show(-1);
    else return;
    e.preventDefault();
  };
  o.view.drawn.push(draw);
  return {
    canvas,
    draw,
    zoom,
    all,
    read
  };
}
