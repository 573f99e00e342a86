// What every part of the page uses: the data, words for numbers, colors, and canvases that can be pointed at.
const D = JSON.parse(document.getElementById("data").textContent),
  $ = id => document.getElementById(id);
window.report = D;
const scaled = (n, names, k = 0) => {
  let x = n;
  while (Math.abs(x) >= 1024 && k < names.length - 1) {
    x /= 1024;
    k++;
  }
  return (k ? x.toFixed(2) : x) + " " + names[k];
};
const size = n => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB"]);
const secs = t => t >= 1 ? t.toFixed(2) + " s" : t >= 1e-3 ? (t * 1e3).toFixed(1) + " ms" : (t * 1e6).toFixed(0) + " µs";
const WORDS = {
  bytes: size,
  seconds: secs,
  percent: x => (x >= 0 ? "+" : "") + (100 * x).toFixed(1) + " %",
  share: x => (100 * x).toFixed(1) + " %",
  count: x => String(x),
  text: x => x,
  shape: x => x
};

function make(tag, given = {}, ...inside) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(given))
    if (k in node) node[k] = v;
    else node.setAttribute(k, v);
  node.append(...inside);
  return node;
}
let paints = {};
const color = name => paints[name] ??= getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const key = (name, text) => {
  const k = make("span", {
    className: "key"
  }, text);
  k.style.setProperty("--c", `var(--${name})`);
  return k;
};

function tip(text, x = 0, y = 0) {
  const box = $("tip");
  box.textContent = text;
  box.style.display = text ? "block" : "none";
  if (!text) return;
  box.style.left = Math.max(4, Math.min(innerWidth - box.offsetWidth - 8, x + 14)) + "px";
  box.style.top = Math.max(4, Math.min(innerHeight - box.offsetHeight - 8, y + 14)) + "px";
}
// All that changed between two frames is drawn once.
const waiting = new Set();

function later(draw) {
  if (!waiting.size) requestAnimationFrame(() => {
    const now = [...waiting];
    waiting.clear();
    now.forEach(f => f());
  });
  waiting.add(draw);
}
// Charts of one axis share a view, [a, b) of [0, end): moving one moves them all.
const views = {};
const view = (name, start, end) => views[name] ??= {
  start,
  end,
  a: start,
  b: end,
  drawn: []
};

function reframe(v, a, b) {
  const span = Math.min(b - a, v.end - v.start);
  v.a = Math.max(v.start, Math.min(v.end - span, a));
  v.b = v.a + span;
  v.drawn.forEach(later);
}
// Round levels of a scale of bytes within [low, high].
function levels(low, high) {
  const span = Math.max(1, high - low),
    unit = 1024 ** Math.max(0, Math.floor(Math.log(span / 2) / Math.log(1024))),
    rough = span / unit / 5,
    base = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, unit * base * [1, 2, 2.5, 5, 10].find(m => base * m >= rough)),
    found = [];
  for (let b = Math.ceil(low / step) * step; b <= high; b += step) found.push(Math.round(b));
  return found;
}
const short = b => size(b).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ");

function frame(g, w, h, left, bottom, top, v, unit) {
  const low = h - 18,
    y = b => low - (low - 10) * (b - bottom) / (top - bottom);
  g.strokeStyle = color("line");
  g.fillStyle = color("soft");
  g.textAlign = "right";
  for (const b of levels(bottom, top)) {
    g.beginPath();
    g.moveTo(left, y(b));
    g.lineTo(w - 4, y(b));
    g.stroke();
    g.fillText(short(b), left - 6, y(b) + 4);
  }
  ends(g, w, h, left, v, unit);
}
// A dashed line across with its name, readable over whatever is behind it.
function across(g, w, left, y, text, tint, dashes, beside = []) {
  g.strokeStyle = color(tint);
  g.setLineDash(dashes);
  g.lineWidth = 1.5;
  g.beginPath();
  g.moveTo(left, y);
  g.lineTo(w - 4, y);
  g.stroke();
  g.setLineDash([]);
  g.textAlign = "right";
  g.lineJoin = "round";
  g.lineWidth = 4;
  g.strokeStyle = color("card");
  let at = y < 26 ? y + 15 : y - 5;
  if (beside.some(b => Math.abs(b - at) < 14)) at = y + 15;
  beside.push(at);
  g.strokeText(text, w - 10, at);
  g.fillStyle = color(tint);
  g.fillText(text, w - 10, at);
  g.textAlign = "left";
  g.lineWidth = 1;
}
// Pixels to be written to directly, kept from frame to frame.
const sheets = {};

function paper(w, h) {
  const found = sheets[`${w},${h}`] ??= (() => {
    const canvas = make("canvas", {
        width: w,
        height: h
      }),
      image = new ImageData(w, h);
    return {
      canvas,
      image,
      pixels: new Uint32Array(image.data.buffer)
    };
  })();
  found.pixels.fill(0);
  found.put = (g, x, y, wide, high) => {
    found.canvas.getContext("2d").putImageData(found.image, 0, 0);
    g.drawImage(found.canvas, x, y, wide, high);
  };
  return found;
}
const packed = (g, text) => {
  g.fillStyle = text;
  const n = parseInt(g.fillStyle.slice(1), 16);
  return (0xff000000 | (n & 255) << 16 | n & 0xff00 | n >> 16) >>> 0;
};

function ends(g, w, h, left, v, unit) {
  const word = x => unit === "seconds" ? secs(x) : `${unit} ${Math.round(x)}`;
  g.fillStyle = color("soft");
  g.textAlign = "left";
  g.fillText(word(v.a), left, h - 5);
  g.textAlign = "right";
  g.fillText(word(v.b), w - 6, h - 5);
  g.textAlign = "left";
}
const PARTS = {};