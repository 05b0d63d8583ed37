"use strict";
// CHARTS (jaxrl/commands/report/charts.py): `lines` shows all chosen runs; `fan` (quantiles) and
// `stack` (parts of a sum) show the run in focus. The first chart is the large one.
let CHARTS = JSON.parse(document.getElementById("chart-list").textContent);
const HUES = 8;
const DASHES = [[], [7, 4], [2, 3]];
const drawn = [];
const folded = new Set();
let smoothing = 1;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => () => css(`--c${i % HUES}`);
const faint = (i, share) => () => css(`--c${i % HUES}`) + share;
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
  const axis = { stroke: () => css("--quiet"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: FONT };
  const up = { ...axis, size: 50, values: log ? (_, v) => v.map((t) => t == null ? "" : shown(t)) : ticks };
  const whole = [1, 2, 5].flatMap((n) => Array.from({ length: 12 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);
  const steps = { ...axis, size: 28, space: 44, grid: { show: false }, incrs: whole, values: (_, v) => v.map(String) };
  return [steps, up, ...(right ? [{ ...up, scale: "right", side: 1, grid: { show: false }, values: ticks }] : [])];
}

// A flat curve gets an axis around its value.
function range(_, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

const stepRange = (_, low, high) => low === high ? [Math.max(0, (low ?? 0) - 1), (high ?? 0) + 1] : [low, high];

// A curve at a step: its newest value up to there, null before its start and past its end.
function readerOf([steps, values]) {
  return (step) => {
    if (step < steps[0] || step > steps.at(-1)) return null;
    let found = values.length - 1;
    while (found > 0 && (steps[found] > step || values[found] == null)) found--;
    return values[found];
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

// What a series shows besides its line: a name, its values, and a text at its end.
const named = (label, table, says = shown) => ({ label, says, reads: readerOf(table), ends: `${label} ${says(+(table[1].findLast((v) => v != null) ?? 0).toPrecision(3))}` });

function lines(chart, runs) {
  const tables = [], series = [{}], several = RUNS.length > 1;
  const metrics = Object.entries(chart.metrics), alone = metrics.length === 1;
  // Shares need no second scale: they are compared on one.
  const shares = runs.every((run) => metrics.every(([metric]) => (run.series[metric]?.[1] ?? []).every((v) => v >= 0 && v <= 1)));
  const right = shares ? null : chart.right;
  const says = chart.log ? (v) => v === 0 ? "0 (exact)" : shown(v) : shown;
  const add = (table, more) => { tables.push(table); series.push({ spanGaps: true, ...more }); };
  for (const run of runs) metrics.forEach(([metric, name], m) => {
    const hue = several ? run.index : m;
    for (const part of [run, ...run.rolled_back]) {
      const found = part.series[metric], discarded = part !== run;
      if (!found) continue;
      const table = [found[0], found[1].map((v) => chart.log && metric !== right && v <= 0 ? null : v)];
      const label = several ? (alone ? run.name : `${run.name} ${name}`) : name, scale = metric === right ? "right" : "y";
      const dots = found[0].length === 1 || (chart.points.includes(metric) && found[0].length < 60), curve = smoothing > 1 && !dots && found[0].length > smoothing;
      if (curve) add(table, { label: "", stroke: faint(hue, "55"), scale, width: 1, points: { show: false } });
      const told = named(discarded ? `${label}, discarded by rollback ${part.number}` : label, [found[0], curve ? smooth(found[1]) : found[1]], says);
      add(curve ? [table[0], smooth(table[1])] : table, {
        ...told, ...(discarded ? { ends: null } : {}),
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
  const series = [{}, ...names.map((label, i) => ({ ...named(label, found[i]), stroke: label === "p50" ? color(0) : faint(0, "66"), width: label === "p50" ? 2 : 1, spanGaps: true, points: { show: found[i][0].length === 1 } }))];
  const bands = [{ series: [5, 1], fill: faint(0, "22") }, { series: [4, 2], fill: faint(0, "33") }];
  return { data: uPlot.join(found), series, bands, runs: [run] };
}

function stack(chart, run) {
  const known = Object.entries(chart.metrics).filter(([metric]) => run.series[metric]);
  if (!known.length) return null;
  const [steps, ...parts] = uPlot.join(known.map(([metric]) => run.series[metric]));
  const total = steps.map(() => 0), sums = parts.map((part) => part.map((v, i) => (total[i] += v)));
  const hue = (p) => chart.hues.length ? () => `rgb(${css(`--${chart.hues[p]}`)})` : color(p);
  const wash = (p) => chart.hues.length ? () => `rgba(${css(`--${chart.hues[p]}`)}, 0.35)` : faint(p, "55");
  // Drawn from the top down, so that each part covers those below. Thin parts have no label.
  const series = [{}], data = [steps], last = total.at(-1) || 1;
  for (let p = known.length - 1; p >= 0; p--) {
    const told = named(known[p][1], [steps, parts[p]]);
    if (parts[p].at(-1) / last < 0.04) told.ends = null;
    series.push({ ...told, stroke: hue(p), width: 1, fill: wash(p), points: { show: steps.length === 1 } });
    data.push(sums[p]);
  }
  const bands = known.slice(1).map((_, p) => ({ series: [p + 1, p + 2], fill: wash(known.length - 1 - p) }));
  return { data, series, bands, runs: [run], ordered: true };
}

// The value of a chart whose curves never change, to be named instead of drawn; else null.
function constant(chart, runs) {
  const values = runs.flatMap((run) => Object.keys(chart.metrics).flatMap((metric) => [run, ...run.rolled_back].map((part) => part.series[metric]?.[1])));
  const known = values.filter(Boolean);
  if (chart.kind !== "lines" || !known.length || known.some((v) => v.some((x) => x !== v[0]) || v.length < 2)) return null;
  const found = Object.entries(chart.metrics).map(([metric, label]) => [label, [...new Set(runs.map((run) => run.series[metric]?.[1][0]).filter((v) => v != null).map((v) => chart.log && v === 0 ? "0 (exact)" : shown(v)))]]);
  return found.filter(([, values]) => values.length).map(([label, values]) => `${label} ${values.join(" or ")}`).join(", ");
}

// With several runs the colour is the run's and the stroke the metric's.
function strokes(chart) {
  const names = Object.values(chart.metrics);
  if (RUNS.length === 1 || chart.kind !== "lines" || names.length === 1) return "";
  return names.map((name, m) => `${["solid", "dashed", "dotted"][m % 3]} ${name}`).join(", ");
}

function drawChart(place, chart, runs, focus, height) {
  const shownRuns = chart.kind === "lines" ? runs : [focus];
  if (chart.unless && shownRuns.every((run) => run.series[chart.unless])) return;
  const made = chart.kind === "lines" ? lines(chart, runs) : chart.kind === "fan" ? fan(chart, focus) : stack(chart, focus);
  if (!made) return;
  const card = element("div", { className: "card chart" }, [
    element("h3", {}, [chart.title + (chart.kind !== "lines" && RUNS.length > 1 ? `: ${focus.name}` : "")]),
    element("p", { className: "note" }, [[chart.note, strokes(chart)].filter(Boolean).join("; ")]),
  ]);
  place.append(card);
  const right = made.series.some((one) => one.scale === "right"), room = (u) => right ? 0 : labelRoom(u.series, u.width);
  const u = new uPlot({
    width: Math.max(240, card.clientWidth - 26), height, series: made.series, bands: made.bands, axes: axes(right, chart.log),
    scales: { x: { time: false, range: stepRange }, y: chart.log ? { distr: 3 } : { range }, right: { range } },
    padding: [8, room, 0, 0], legend: { show: false },
    cursor: { sync: { key: "steps" }, points: { size: 7 } }, hooks: { draw: [alarmLines(made.runs), endLabels], setCursor: [showReadout] },
  }, made.data, card);
  u.ordered = made.ordered;
  u.over.addEventListener("mouseleave", () => { readout.hidden = true; });
  drawn.push(u);
}

// Several runs are compared in one metric at a time, first in the last one that all of them have.
function chartsFor(runs) {
  const [first, ...rest] = CHARTS, names = Object.entries(first.metrics);
  if (RUNS.length === 1 || names.length === 1) return CHARTS;
  const main = names.findLast(([metric]) => runs.every((run) => run.series[metric]?.[0].length > 1)) ?? names[0];
  const alone = ([metric, label]) => ({ ...first, metrics: { [metric]: label }, title: label[0].toUpperCase() + label.slice(1), note: "", right: null });
  return [alone(main), ...names.filter((one) => one !== main).map((one) => ({ ...alone(one), group: rest[0]?.group ?? "Learning" })), ...rest];
}

function drawCharts(runs, focus) {
  drawn.splice(0).forEach((u) => u.destroy());
  const [first, ...rest] = chartsFor(runs), place = document.getElementById("charts"), hero = document.getElementById("hero");
  hero.replaceChildren();
  place.replaceChildren();
  readout.hidden = true;
  drawChart(hero, first, runs, focus, innerWidth < 600 ? 240 : 320);
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
  resize();
}

function resize() {
  for (const u of drawn) {
    const width = Math.max(240, u.root.parentElement.clientWidth - 26);
    if (u.root.parentElement.clientWidth && width !== u.width) u.setSize({ width, height: u.height });
  }
}
new ResizeObserver(resize).observe(document.documentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((u) => u.redraw(false, true)));
