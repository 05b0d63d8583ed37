"use strict";
// What became of the runs: a sentence, tiles or a table, and the state of the alarms.
const brief = (v) => String(+v.toPrecision(3));
const percent = (v) => `${(100 * v).toFixed(1)}\u00a0%`; // one word: a line never ends before its %
const duration = (s) => s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
// A path quoted for a shell.
const quoted = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;

// The metrics that a run can be judged by, the best first.
const GOALS = [
  { metric: "eval/accuracy", name: "held-out accuracy", says: percent },
  { metric: "reward", name: "reward", says: brief },
  { metric: "loss", name: "loss", says: brief, falls: true },
];

const capital = (text) => text[0].toUpperCase() + text.slice(1);

// "after 60 steps", or what a run that is not at its end has done so far.
function soFar(run) {
  const all = run.config["train.steps"];
  const count = `${run.last_step} ${run.last_step === 1 ? "step" : "steps"}`;
  return all != null && run.last_step < all ? `after ${run.last_step} of ${all} steps` : `in ${count}`;
}

function sentence(runs) {
  return told(runs).replaceAll("held-out", "held\u2011out").replaceAll("Held-out", "Held\u2011out");
}

function told(runs) {
  const goal = GOALS.find(({ metric }) => runs.some((run) => run.series[metric]));
  if (!goal) return runs.length === 1 ? `${capital(soFar(runs[0]).replace(/^in /, ""))}.` : `${runs.length} runs.`;
  const { metric, name, says, falls } = goal, judged = runs.filter((run) => run.series[metric]);
  const ends = judged.map((run) => run.series[metric][1].at(-1));
  if (runs.length === 1) {
    const [first, last] = [judged[0].series[metric][1][0], ends[0]].map(says);
    if (judged[0].series[metric][1].length === 1) return `${capital(name)} is ${last}, ${soFar(runs[0]).replace(/^in /, "after ")}.`;
    if (first === last) return `${capital(name)} stayed at ${last} ${soFar(runs[0])}.`;
    return `${capital(name)} ${ends[0] > judged[0].series[metric][1][0] ? "rose" : "fell"} from ${first} to ${last} ${soFar(runs[0])}.`;
  }
  const top = says(falls ? Math.min(...ends) : Math.max(...ends)), ahead = judged.filter((_, i) => says(ends[i]) === top);
  const whole = ahead.length === judged.length ? `All ${judged.length} runs` : ahead.length > 2 ? `${ahead.length} of ${judged.length} runs` : ahead.map((run) => run.name).join(" and ");
  return `${whole} ${ahead.length > 1 ? "end" : "ends"} with the ${falls ? "lowest" : "highest"} ${name}, ${top}${ahead.length < 3 ? `, of ${judged.length} runs` : ""}.`
    .replace(/^(All \d+ runs end) with the (lowest|highest) /, "$1 with the same ");
}

// Results of a run: {name: [value, remark]}.
function outcome(run) {
  const accuracy = run.series["eval/accuracy"], speed = run.series.tokens_per_second, found = {};
  if (accuracy) {
    const [steps, values] = accuracy, best = values.lastIndexOf(Math.max(...values));
    const failed = run.series["eval/failed"]?.[1].at(-1), all = run.series["eval/completions"]?.[1].at(-1);
    found["held-out accuracy"] = [percent(values.at(-1)), failed ? `${failed} of ${all} not scored` : values.length > 1 ? `from ${percent(values[0])}` : ""];
    found["best model"] = [`step ${steps[best]}`, percent(values[best])];
  }
  const unscored = run.series["reward/failed"]?.[1].at(-1), of = run.series.completions?.[1].at(-1);
  const key = run.series.reward ? "reward" : run.series.loss ? "loss" : null, curve = run.series[key]?.[1];
  if (curve) found[key] = [brief(curve.at(-1)), key === "reward" && unscored ? `${unscored} of ${of} failed` : curve.length > 1 ? `from ${brief(curve[0])}` : ""];
  found.steps = [String(run.last_step), run.config["train.steps"] == null ? "" : `of ${run.config["train.steps"]}`];
  if (run.seconds) found.time = [duration(run.seconds), "in steps"];
  if (speed) found["tokens/s"] = [Math.round(median(speed[1])).toLocaleString("en"), "median"];
  return found;
}

// Tiles for one run, a table for several.
function tiles(runs) {
  const found = runs.map(outcome), names = [...new Set(found.flatMap(Object.keys))];
  if (RUNS.length === 1) return element("div", { className: "tiles" }, names.map((name) => {
    const [value, remark] = found[0][name];
    return element("div", { className: "card tile" }, [element("div", { className: "quiet" }, [name]), element("div", { className: "value" }, [value]), element("div", { className: "quiet" }, [remark])]);
  }));
  const head = element("tr", {}, ["run", ...names].map((name) => element("th", {}, [name])));
  const rows = runs.map((run, i) => element("tr", {}, [element("td", {}, [title(run)]), ...names.map((name) => element("td", { title: found[i][name]?.[1] ?? "" }, [found[i][name]?.[0] ?? "-"]))]));
  return element("div", { className: "scroll card" }, [element("table", {}, [head, ...rows])]);
}

// The commands that continue from here, each in a line of its own.
function commands(runs) {
  return runs.filter((run) => run.series["eval/accuracy"]).slice(0, 1).map((run) =>
    element("p", { className: "command quiet" }, ["best model ", element("code", {}, [`jaxrl export ${quoted(run.path)} OUT --step best`])]));
}

// A chip with the number of alarms, which leads to them.
function chip(runs) {
  const count = runs.flatMap((run) => run.alarms.filter((event) => !event.repeated)).length;
  return count
    ? element("a", { className: "chip raised", href: "#alarms" }, [count === 1 ? "1 alarm" : `${count} alarms`])
    : element("span", { className: "chip" }, ["no alarms"]);
}
