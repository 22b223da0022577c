"use strict";

// Arithmetic: functions of logits, options and noise alone, as in gapped.simplex and gapped.pathwise.

const sum = (x) => x.reduce((a, b) => a + b, 0);
const largest = (x) => x.reduce((a, b) => (a > b ? a : b));
const argmax = (x) => x.indexOf(largest(x));
const shift = (x) => { const top = largest(x); return x.map((v) => v - top); };
const softmax = (x, tau = 1) => {
  const weights = shift(x).map((v) => Math.exp(v / tau));
  const total = sum(weights);
  return weights.map((w) => w / total);
};
const logaddexp = (a, b) => Math.max(a, b) + Math.log1p(Math.exp(-Math.abs(a - b)));

// The first category whose cumulative weight exceeds u times the total.
function inverseCdf(theta, u) {
  const weights = shift(theta).map(Math.exp);
  const threshold = u * sum(weights);
  let running = 0;
  return weights.findIndex((w) => (running += w) > threshold);
}

// Lemma 1 of the paper, guarded as in the published experiments.
function expectedGap(p) {
  const guarded = p * (1 - 1e-5);
  return -Math.log1p(-guarded) / guarded;
}

// log p + G given that `index` wins, from unit exponentials.
function conditionalGumbel(logP, index, exponentials) {
  const winner = Math.log(exponentials[index]);
  return logP.map((q, j) => (j === index ? -winner : -logaddexp(Math.log(exponentials[j]) - q, winner)));
}

// GST's perturbation once `index` is drawn: m1 raises its logit to the largest, m2 lowers the others.
function movements(theta, index, gap) {
  const top = largest(theta);
  const g = gap === "expected" ? expectedGap(softmax(theta)[index]) : gap;
  return {
    m1: theta.map((t, j) => (j === index ? top - t : 0)),
    m2: theta.map((t, j) => (j === index ? 0 : Math.max(t + g - top, 0))),
  };
}

function gstSurrogate(theta, index, gap, tau) {
  const { m1, m2 } = movements(theta, index, gap);
  return softmax(theta.map((t, j) => t + m1[j] - m2[j]), tau);
}

// Each: (logits, options, noise) -> the drawn category and the points that its surrogate averages. The noise
// has a uniform `u`, unit exponentials `e`, one per category, and `many`, a list of such for Gumbel-Rao.
const ESTIMATORS = {
  "gumbel-softmax": {
    name: "STGS",
    about: "Straight-through Gumbel-softmax: the surrogate is softmax((θ + G) / τ), and its largest entry is what is drawn. It keeps all of the Gumbel noise.",
    draw(theta, { tau }, { e }) {
      const scores = theta.map((t, j) => t - Math.log(e[j]));
      return { chosen: argmax(scores), points: [softmax(scores, tau)] };
    },
  },
  "straight-through": {
    name: "ST",
    about: "Straight-through: the surrogate is softmax(θ / τ), whatever is drawn. It does not know the category.",
    draw: (theta, { tau }, { u }) => ({ chosen: inverseCdf(theta, u), points: [softmax(theta, tau)] }),
  },
  "gumbel-rao": {
    name: "GR-MC",
    about: "Gumbel-Rao: the surrogates of several Gumbel noises that lead to the drawn category, averaged.",
    draw(theta, { tau, samples }, { u, many }) {
      const chosen = inverseCdf(theta, u);
      const logP = softmax(theta).map(Math.log);
      const parts = many.slice(0, samples);
      return { chosen, points: parts.map((e) => softmax(conditionalGumbel(logP, chosen, e), tau)) };
    },
  },
  gst: {
    name: "GST",
    about: "Gapped straight-through: m₁ raises the drawn logit to the largest, m₂ lowers the others until the gap is there. Given the category nothing is random.",
    draw(theta, { tau, gap }, { u }) {
      const chosen = inverseCdf(theta, u);
      return { chosen, points: [gstSurrogate(theta, chosen, gap, tau)] };
    },
  },
  reinmax: {
    name: "ReinMax",
    about: "ReinMax has no surrogate, only a gradient: 2 J(q) g − ½ J(p) g. Shown is q, halfway between softmax(θ / τ) and the drawn corner.",
    draw(theta, { tau }, { u }) {
      const chosen = inverseCdf(theta, u);
      return { chosen, points: [softmax(theta, tau).map((h, j) => (h + (j === chosen ? 1 : 0)) / 2)] };
    },
  },
};

const mean = (points) => points[0].map((_, j) => sum(points.map((point) => point[j])) / points.length);

function sample(name, theta, options, noise) {
  const { chosen, points } = ESTIMATORS[name].draw(theta, options, noise);
  return { chosen, points, surrogate: points.length === 1 ? points[0] : mean(points) };
}

// The distance of the two largest perturbed logits τ log h, averaged over what the surrogate averages.
function meanGap(points, tau) {
  const gaps = points.map((point) => {
    const first = argmax(point);
    const second = largest(point.filter((_, j) => j !== first));
    return tau * Math.log(point[first] / second);
  });
  return sum(gaps) / gaps.length;
}

// What the table shows of the samples of one category.
function describe(samples, tau) {
  if (!samples.length) return { count: 0 };
  const centre = mean(samples.map((s) => s.surrogate));
  const squares = samples.map((s) => sum(s.surrogate.map((h, j) => (h - centre[j]) ** 2)));
  return {
    count: samples.length,
    centre,
    spread: Math.sqrt(sum(squares) / samples.length),
    gap: sum(samples.map((s) => meanGap(s.points, tau))) / samples.length,
  };
}

// Noise: Marsaglia's xorshift generator (2003), so that a seed gives the same picture everywhere.

function uniforms(seed) {
  let state = (0x9e3779b9 ^ Math.imul(seed + 1, 0x85ebca6b)) || 1;
  const next = () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 4294967296;
  };
  for (let i = 0; i < 8; i++) next();
  return next;
}

const MOST = { points: 2000, samples: 100 };

function makeNoise(seed) {
  const list = (length, make) => Array.from({ length }, (_, i) => make(i));
  const three = (draw) => list(3, () => -Math.log(draw()));
  const first = uniforms(2 * seed), later = uniforms(2 * seed + 1);
  // Most of the noise is for Gumbel-Rao alone: it is made when first asked for.
  let many;
  const all = () => (many ??= list(MOST.points, () => list(MOST.samples, () => three(later))));
  return list(MOST.points, (i) => ({ u: first(), e: three(first), get many() { return all()[i]; } }));
}

// The page.

const CORNERS = [[200, 24], [20, 24 + 180 * Math.sqrt(3)], [380, 24 + 180 * Math.sqrt(3)]];
const place = (h) => [0, 1].map((axis) => sum(h.map((weight, j) => weight * CORNERS[j][axis])));
const at = (h) => place(h).map((v) => v.toFixed(2)).join(" ");
const find = (id) => document.getElementById(id);
const number = (x, digits = 2) => (Math.abs(x) < 0.5 * 10 ** -digits ? 0 : x).toFixed(digits).replace("-", "−");
const vector = (x) => "(" + x.map((v) => number(v)).join(", ") + ")";
const NAMES = [...document.querySelectorAll("[data-category]")].map((row) => row.dataset.category);

let seed = 0;
let noise = makeNoise(seed);

function state() {
  const value = (id) => Number(find(id).value);
  return {
    name: document.querySelector("input[name=estimator]:checked").value,
    theta: NAMES.map((_, j) => value("logit-" + j)),
    tau: value("tau"),
    gap: find("expected").checked ? "expected" : value("gap"),
    samples: value("samples"),
    count: value("points"),
  };
}

function arrow(from, to, size) {
  const [x, y] = from, [u, v] = to;
  const length = Math.hypot(u - x, v - y);
  if (length < 1) return "";
  const [a, b] = [(size * (u - x)) / length, (size * (v - y)) / length];
  const wing = (side) => `L${(u - a + side * 0.55 * b).toFixed(2)} ${(v - b - side * 0.55 * a).toFixed(2)}`;
  return `M${u.toFixed(2)} ${v.toFixed(2)}${wing(1)}${wing(-1)}Z`;
}

function drawMovements(now) {
  const start = softmax(now.theta, now.tau);
  NAMES.forEach((_, i) => {
    const shown = now.name === "gst";
    const after = gstSurrogate(now.theta, i, 0, now.tau);
    const end = gstSurrogate(now.theta, i, now.gap, now.tau);
    find("m1-" + i).setAttribute("d", shown ? `M${at(start)}L${at(after)}` : "");
    find("m2-" + i).setAttribute("d", shown ? `M${at(after)}L${at(end)}` : "");
    const heads = arrow(place(start), place(after), 8) + arrow(place(after), place(end), 8);
    find("heads-" + i).setAttribute("d", shown ? heads : "");
  });
  const [x, y] = place(start);
  find("start").setAttribute("cx", x.toFixed(2));
  find("start").setAttribute("cy", y.toFixed(2));
}

function drawSamples(samples, found) {
  NAMES.forEach((_, i) => {
    const mine = samples.filter((s) => s.chosen === i);
    find("dots-" + i).setAttribute("d", mine.map((s) => `M${at(s.surrogate)}h0`).join(""));
    const ring = find("mean-" + i);
    ring.style.display = mine.length ? "" : "none";
    if (!mine.length) return;
    const [x, y] = place(found[i].centre);
    ring.setAttribute("cx", x.toFixed(2));
    ring.setAttribute("cy", y.toFixed(2));
  });
}

function fillTable(now, found) {
  const p = softmax(now.theta);
  const surrogate = now.name !== "reinmax";
  NAMES.forEach((name, i) => {
    const { count, centre, spread, gap } = found[i];
    const { m1, m2 } = movements(now.theta, i, now.gap);
    const texts = {
      p: number(p[i], 3),
      drawn: `${count}`,
      centre: count ? vector(centre) : "–",
      spread: count ? number(spread, 3) : "–",
      gap: count && surrogate ? number(gap) : "–",
      lemma: number(expectedGap(p[i])),
      m1: vector(m1),
      m2: vector(m2),
    };
    const row = document.querySelector(`[data-category="${name}"]`);
    for (const [key, text] of Object.entries(texts)) row.querySelector(`[data-key="${key}"]`).textContent = text;
  });
  for (const cell of document.querySelectorAll(".movement")) cell.hidden = now.name !== "gst";
}

function sentence(now, samples) {
  const agree = samples.filter((s) => s.surrogate[s.chosen] >= largest(s.surrogate) - 1e-12).length;
  const what = now.name === "reinmax" ? "points" : "surrogates";
  return `${ESTIMATORS[now.name].name}: ${agree} of ${samples.length} ${what} are largest at the drawn category.`;
}

function update() {
  const now = state();
  for (const id of ["logit-0", "logit-1", "logit-2", "tau"]) find(id + "-value").value = number(Number(find(id).value));
  find("gap-value").value = now.gap === "expected" ? "Lemma 1" : number(now.gap);
  find("samples-value").value = now.samples;
  find("points-value").value = now.count;
  find("gap").disabled = now.gap === "expected";
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = part.dataset.for !== now.name;
  find("about").textContent = ESTIMATORS[now.name].about;
  const samples = noise.slice(0, now.count).map((one) => sample(now.name, now.theta, now, one));
  const found = NAMES.map((_, i) => describe(samples.filter((s) => s.chosen === i), now.tau));
  drawSamples(samples, found);
  drawMovements(now);
  fillTable(now, found);
  find("summary").textContent = sentence(now, samples);
}

// At most one drawing a frame, however fast a slider moves.
let waiting = false;
function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; update(); });
}

find("controls").addEventListener("input", soon);
find("controls").addEventListener("submit", (event) => event.preventDefault());
find("noise").addEventListener("click", () => { noise = makeNoise(++seed); update(); });
find("controls").addEventListener("reset", () => { noise = makeNoise((seed = 0)); setTimeout(update); });
update();
