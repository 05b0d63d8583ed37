"use strict";
// CHARTS (jaxrl/commands/report/charts.py): `lines` shows all chosen runs; `fan` (quantiles) and
// `stack` (parts of a sum) show the run in focus.
const CHARTS = JSON.parse(document.getElementById("chart-list").textContent);
const DASHES = [[], [7, 4], [2, 3]];
const drawn = [];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => () => css(`--c${i % 6}`);
const faint = (i, share) => () => css(`--c${i % 6}`) + share;
const shown = (v) => v == null ? "-" : v === 0 ? "0" : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5 ? String(+v.toPrecision(4)) : v.toExponential(1);

function axes(right) {
  const axis = { stroke: () => css("--quiet"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 }, font: "11px system-ui" };
  const up = { ...axis, size: 62, values: (_, ticks) => ticks.map((t) => t == null ? "" : shown(t)) };
  return [{ ...axis, size: 28 }, up, ...(right ? [{ ...up, scale: "right", side: 1, grid: { show: false } }] : [])];
}

// A flat curve gets an axis around its value.
function range(_, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  return uPlot.rangeNum(low, high, 0.1, true);
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
  const tables = [], series = [{ label: "step" }], several = RUNS.length > 1;
  const metrics = Object.entries(chart.metrics), alone = metrics.length === 1;
  for (const run of runs) metrics.forEach(([metric, name], m) => {
    const hue = several ? run.index : m;
    for (const part of [run, ...run.rolled_back]) {
      const found = part.series[metric], discarded = part !== run;
      if (!found) continue;
      tables.push([found[0], found[1].map((v) => chart.log && metric !== chart.right && v <= 0 ? null : v)]);
      const label = several ? (alone ? run.name : `${run.name} ${name}`) : name;
      series.push({
        label: discarded ? `${label}, discarded by rollback ${part.number}` : label,
        stroke: discarded ? faint(hue, "88") : color(hue), dash: discarded ? [2, 2] : several ? DASHES[m % 3] : [],
        scale: metric === chart.right ? "right" : "y", width: 1.5, spanGaps: true,
        points: { show: chart.points === true && found[0].length < 60, size: 5 }, value: (_, v) => shown(v),
      });
    }
  });
  return tables.length ? { data: uPlot.join(tables), series, bands: [], runs } : null;
}

function fan(chart, run) {
  const names = Object.values(chart.metrics), found = Object.keys(chart.metrics).map((metric) => run.series[metric]);
  if (found.length < 5 || found.some((f) => !f)) return null;
  const series = [{ label: "step" }, ...names.map((label) => ({ label, stroke: label === "p50" ? color(0) : faint(0, "66"), width: label === "p50" ? 2 : 1, spanGaps: true, points: { show: false }, value: (_, v) => shown(v) }))];
  const bands = [{ series: [5, 1], fill: faint(0, "22") }, { series: [4, 2], fill: faint(0, "33") }];
  return { data: uPlot.join(found), series, bands, runs: [run] };
}

function stack(chart, run) {
  const known = Object.entries(chart.metrics).filter(([metric]) => run.series[metric]);
  if (!known.length) return null;
  const [steps, ...parts] = uPlot.join(known.map(([metric]) => run.series[metric]));
  const total = steps.map(() => 0), sums = parts.map((part) => part.map((v, i) => (total[i] += v)));
  // Drawn from the top down, so that each part covers those below.
  const series = [{ label: "step" }], data = [steps];
  for (let p = known.length - 1; p >= 0; p--) {
    series.push({ label: known[p][1], stroke: color(p), width: 1, fill: faint(p, "55"), points: { show: false }, value: (_u, _v, _s, i) => i == null ? "-" : shown(parts[p][i]) });
    data.push(sums[p]);
  }
  const bands = known.slice(1).map((_, p) => ({ series: [p + 1, p + 2], fill: faint(known.length - 1 - p, "55") }));
  return { data, series, bands, runs: [run] };
}

function drawCharts(runs, focus) {
  const place = document.getElementById("charts");
  drawn.splice(0).forEach((u) => u.destroy());
  place.replaceChildren();
  for (const chart of CHARTS) {
    const made = chart.kind === "lines" ? lines(chart, runs) : chart.kind === "fan" ? fan(chart, focus) : stack(chart, focus);
    if (!made) continue;
    const card = element("div", { className: "card chart" }, [
      element("h3", {}, [chart.title + (chart.kind !== "lines" && RUNS.length > 1 ? `: ${focus.name}` : "")]),
      element("p", { className: "note" }, [chart.note]),
    ]);
    place.append(card);
    const width = Math.max(240, card.clientWidth - 26);
    const u = new uPlot({
      width, height: 210, series: made.series, bands: made.bands, axes: axes(made.series.some((one) => one.scale === "right")),
      scales: { x: { time: false }, y: chart.log ? { distr: 3 } : { range }, right: { range } },
      cursor: { sync: { key: "steps" } }, hooks: { draw: [alarmLines(made.runs)] },
    }, made.data, card);
    drawn.push(u);
  }
}

new ResizeObserver(() => drawn.forEach((u) => {
  const width = Math.max(240, u.root.parentElement.clientWidth - 26);
  if (width !== u.width) u.setSize({ width, height: 210 });
})).observe(document.documentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((u) => u.redraw(false, true)));
