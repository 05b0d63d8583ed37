"use strict";
// CHARTS (jaxrl/commands/report/charts.py): `lines` shows all chosen runs; `fan` (quantiles) and
// `stack` (parts of a sum) show the run in focus. The first chart is the large one.
const CHARTS = JSON.parse(document.getElementById("chart-list").textContent);
const DASHES = [[], [7, 4], [2, 3]];
const drawn = [];
const folded = new Set();
let smoothing = 1;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => () => css(`--c${i % 6}`);
const faint = (i, share) => () => css(`--c${i % 6}`) + share;
const shown = (v) => v == null ? "-" : v === 0 ? "0" : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5 ? String(+v.toPrecision(4)) : v.toExponential(1);

// Labels of an axis have as many digits as its ticks need to differ.
function ticks(_, values, _axis, _space, step) {
  const known = values.filter((v) => v != null), most = Math.max(...known.map(Math.abs));
  if (!step || most >= 1e5 || most < 1e-3) return values.map((v) => v == null ? "" : shown(v));
  let digits = 0;
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return values.map((v) => v == null ? "" : v.toFixed(digits));
}

function axes(right, log) {
  const axis = { stroke: () => css("--quiet"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const up = { ...axis, size: 58, values: log ? (_, v) => v.map((t) => t == null ? "" : shown(t)) : ticks };
  return [{ ...axis, size: 28, grid: { show: false } }, up, ...(right ? [{ ...up, scale: "right", side: 1, grid: { show: false }, values: ticks }] : [])];
}

// A flat curve gets an axis around its value.
function range(_, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

// The value of a curve at the cursor: its newest point up to there, and past its end "-". Without
// a cursor it is the last one.
function valueOf([steps, values]) {
  return (u, _v, _s, index) => {
    const step = index == null ? Infinity : u.data[0][index];
    if (step < steps[0] || (step > steps.at(-1) && step !== Infinity)) return "-";
    let found = values.length - 1;
    while (found > 0 && (steps[found] > step || values[found] == null)) found--;
    return shown(values[found]);
  };
}

// The mean of the last points, `smoothing` of them.
function smooth(values) {
  return values.map((v, i) => {
    const near = values.slice(Math.max(0, i - smoothing + 1), i + 1).filter((x) => x != null);
    return v == null || !near.length ? null : near.reduce((a, b) => a + b, 0) / near.length;
  });
}

// One line for every alarm of the runs in the chart. A repeated alarm is a tick at the top, so that
// it does not hide the curves. Alarms of rolled-back steps are faint.
function alarmLines(runs) {
  return (u) => {
    const { ctx } = u, { top, height } = u.bbox;
    ctx.save();
    for (const run of runs) for (const alarm of run.alarms) {
      ctx.strokeStyle = RUNS.length > 1 ? color(run.index)() : css("--alarm");
      ctx.globalAlpha = alarm.rollback ? 0.4 : 1;
      ctx.setLineDash(alarm.repeated ? [] : [3, 3]);
      const x = Math.round(u.valToPos(alarm.at, "x", true));
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + (alarm.repeated ? 4 * devicePixelRatio : height)); ctx.stroke();
    }
    ctx.restore();
  };
}

function lines(chart, runs) {
  const tables = [], series = [stepSeries()], several = RUNS.length > 1;
  const metrics = Object.entries(chart.metrics), alone = metrics.length === 1;
  // Shares need no second scale: they are compared on one.
  const shares = runs.every((run) => metrics.every(([metric]) => (run.series[metric]?.[1] ?? []).every((v) => v >= 0 && v <= 1)));
  const right = shares ? null : chart.right;
  const add = (table, more) => { tables.push(table); series.push({ spanGaps: true, value: valueOf(table), ...more }); };
  for (const run of runs) metrics.forEach(([metric, name], m) => {
    const hue = several ? run.index : m;
    for (const part of [run, ...run.rolled_back]) {
      const found = part.series[metric], discarded = part !== run;
      if (!found) continue;
      const table = [found[0], found[1].map((v) => chart.log && metric !== right && v <= 0 ? null : v)];
      const label = several ? (alone ? run.name : `${run.name} ${name}`) : name, scale = metric === right ? "right" : "y";
      const dots = chart.points.includes(metric) && found[0].length < 60, curve = smoothing > 1 && !dots && found[0].length > smoothing;
      if (curve) add(table, { label: "", class: "raw", stroke: faint(hue, "55"), scale, width: 1, points: { show: false } });
      add(curve ? [table[0], smooth(table[1])] : table, {
        label: discarded ? `${label}, discarded by rollback ${part.number}` : label,
        stroke: discarded ? faint(hue, "88") : color(hue), dash: discarded ? [2, 2] : several ? DASHES[m % 3] : [],
        scale, width: curve ? 2 : 1.5, points: { show: dots, size: 6 },
      });
    }
  });
  return tables.length ? { data: uPlot.join(tables), series, bands: [], runs } : null;
}

function fan(chart, run) {
  const names = Object.values(chart.metrics), found = Object.keys(chart.metrics).map((metric) => run.series[metric]);
  if (found.length < 5 || found.some((f) => !f)) return null;
  const series = [stepSeries(), ...names.map((label, i) => ({ label, stroke: label === "p50" ? color(0) : faint(0, "66"), width: label === "p50" ? 2 : 1, spanGaps: true, points: { show: false }, value: valueOf(found[i]) }))];
  const bands = [{ series: [5, 1], fill: faint(0, "22") }, { series: [4, 2], fill: faint(0, "33") }];
  return { data: uPlot.join(found), series, bands, runs: [run] };
}

function stack(chart, run) {
  const known = Object.entries(chart.metrics).filter(([metric]) => run.series[metric]);
  if (!known.length) return null;
  const [steps, ...parts] = uPlot.join(known.map(([metric]) => run.series[metric]));
  const total = steps.map(() => 0), sums = parts.map((part) => part.map((v, i) => (total[i] += v)));
  // Drawn from the top down, so that each part covers those below.
  const series = [stepSeries()], data = [steps];
  for (let p = known.length - 1; p >= 0; p--) {
    series.push({ label: known[p][1], stroke: color(p), width: 1, fill: faint(p, "55"), points: { show: false }, value: valueOf([steps, parts[p]]) });
    data.push(sums[p]);
  }
  const bands = known.slice(1).map((_, p) => ({ series: [p + 1, p + 2], fill: faint(known.length - 1 - p, "55") }));
  return { data, series, bands, runs: [run] };
}

const stepSeries = () => ({ label: "step", value: (u, _v, _s, i) => String(u.data[0][i ?? u.data[0].length - 1]) });

// The value of a chart whose curves never change, to be named instead of drawn; else null.
function constant(chart, runs) {
  const values = runs.flatMap((run) => Object.keys(chart.metrics).flatMap((metric) => [run, ...run.rolled_back].map((part) => part.series[metric]?.[1])));
  const known = values.filter(Boolean);
  if (chart.kind !== "lines" || !known.length || known.some((v) => v.some((x) => x !== v[0]) || v.length < 2)) return null;
  const named = Object.entries(chart.metrics).map(([metric, label]) => [label, [...new Set(runs.map((run) => run.series[metric]?.[1][0]).filter((v) => v != null).map(shown))]]);
  return named.filter(([, found]) => found.length).map(([label, found]) => `${label} ${found.join(" or ")}`).join(", ");
}

function drawChart(place, chart, runs, focus, height) {
  const made = chart.kind === "lines" ? lines(chart, runs) : chart.kind === "fan" ? fan(chart, focus) : stack(chart, focus);
  if (!made) return;
  const card = element("div", { className: "card chart" }, [
    element("h3", {}, [chart.title + (chart.kind !== "lines" && RUNS.length > 1 ? `: ${focus.name}` : "")]),
    element("p", { className: "note" }, [chart.note]),
  ]);
  place.append(card);
  const right = made.series.some((one) => one.scale === "right");
  const u = new uPlot({
    width: Math.max(240, card.clientWidth - 26), height, series: made.series, bands: made.bands, axes: axes(right, chart.log),
    scales: { x: { time: false }, y: chart.log ? { distr: 3 } : { range }, right: { range } },
    cursor: { sync: { key: "steps" }, points: { size: 7 } }, hooks: { draw: [alarmLines(made.runs)] },
  }, made.data, card);
  u.setLegend({ idx: null });
  drawn.push(u);
}

function drawCharts(runs, focus) {
  drawn.splice(0).forEach((u) => u.destroy());
  const [first, ...rest] = CHARTS, place = document.getElementById("charts"), hero = document.getElementById("hero");
  hero.replaceChildren();
  place.replaceChildren();
  drawChart(hero, first, runs, focus, 300);
  for (const name of [...new Set(rest.map((chart) => chart.group))]) {
    const group = rest.filter((chart) => chart.group === name), constants = [];
    const grid = element("div", { className: "grid" }), details = element("details", { open: !folded.has(name) }, [element("summary", {}, [name]), grid]);
    details.addEventListener("toggle", () => { if (details.open) folded.delete(name); else folded.add(name); resize(); });
    place.append(details);
    for (const chart of group) {
      const text = constant(chart, runs);
      if (text) constants.push(text); else drawChart(grid, chart, runs, focus, 190);
    }
    if (constants.length) details.append(element("p", { className: "quiet constants" }, [`Constant: ${constants.join("; ")}.`]));
    if (!grid.childElementCount && !constants.length) details.remove();
  }
}

function resize() {
  for (const u of drawn) {
    const width = Math.max(240, u.root.parentElement.clientWidth - 26);
    if (u.root.parentElement.clientWidth && width !== u.width) u.setSize({ width, height: u.height });
  }
}
new ResizeObserver(resize).observe(document.documentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((u) => u.redraw(false, true)));
