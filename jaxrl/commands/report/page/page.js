"use strict";
// Function declarations are hoisted; RUNS is filled before anything is drawn.
var RUNS = JSON.parse(document.getElementById("data").textContent);
RUNS.forEach((run, index) => { run.index = index; run.chosen = true; markRepeated(run.alarms); });

function element(tag, properties, children = []) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const brief = (v) => String(+v.toPrecision(3));
const percent = (v) => `${(100 * v).toFixed(1)} %`;
const duration = (s) => s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
// A path quoted for a shell.
const quoted = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;

// Results of a run: {name: [value, remark]}.
function outcome(run) {
  const accuracy = run.series["eval/accuracy"], reward = run.series.reward, speed = run.series.tokens_per_second, found = {};
  if (accuracy) {
    const [steps, values] = accuracy, best = values.lastIndexOf(Math.max(...values));
    const failed = run.series["eval/failed"]?.[1] ?? [], all = run.series["eval/completions"]?.[1].at(-1);
    const [before, after] = [0, -1].map((i) => failed.at(i) ? ` (${failed.at(i)} of ${all} could not be scored)` : "");
    found["held-out accuracy"] = [`${percent(values[0])}${before} \u2192 ${percent(values.at(-1))}${after}`, `best ${percent(values[best])} at step ${steps[best]}`];
    found["best model"] = [`step ${steps[best]}`, element("code", {}, [`jaxrl export ${quoted(run.path)} OUT --step best`])];
  }
  const unscored = run.series["reward/failed"]?.[1].at(-1), of = run.series.completions?.[1].at(-1);
  if (reward) found.reward = [`${brief(reward[1][0])} \u2192 ${brief(reward[1].at(-1))}`, `first and last step${unscored ? `; ${unscored} of ${of} failed in the last` : ""}`];
  else if (run.series.loss) found.loss = [`${brief(run.series.loss[1][0])} \u2192 ${brief(run.series.loss[1].at(-1))}`, "first and last reading"];
  found.steps = [`${run.last_step} of ${run.config["train.steps"] ?? "?"}`, run.seconds ? `${duration(run.seconds)} in steps` : ""];
  if (speed) found["tokens/s"] = [shown(Math.round(median(speed[1]))), "median of a step"];
  const alarms = run.alarms.filter((event) => !event.repeated).length;
  found.alarms = [String(alarms), alarms ? element("a", { href: "#alarms" }, ["see below"]) : "none raised"];
  return found;
}

// Tiles for one run, a table for several.
function tiles(runs) {
  const found = runs.map(outcome), names = [...new Set(found.flatMap(Object.keys))];
  if (runs.length === 1) return element("div", { className: "tiles" }, names.map((name) => {
    const [value, remark] = found[0][name];
    return element("div", { className: "card tile" }, [element("div", { className: "quiet" }, [name]), element("div", { className: "value" }, [value]), element("div", { className: "quiet" }, [remark])]);
  }));
  const head = element("tr", {}, ["run", ...names].map((name) => element("th", {}, [name])));
  const rows = runs.map((run, i) => element("tr", {}, [element("td", {}, [title(run)]), ...names.map((name) => element("td", { title: name }, [found[i][name]?.[0] ?? "-"]))]));
  return element("div", { className: "scroll card" }, [element("table", {}, [head, ...rows])]);
}

// Facts of a run: its algorithm, numerics, model and machine.
function facts(run) {
  const start = run.starts.at(-1), c = run.config;
  const words = [c["loss.name"], c.precision, c["model.path"], c["sampler.name"] && `${c["sampler.name"]} sampler`, start?.devices].filter(Boolean);
  return element("span", {}, [...words.flatMap((word) => [word, " \u00b7 "]).slice(0, -1), ...metricsOf(c["sampler.url"] ?? [])]);
}

function machine(run) {
  const start = run.starts.at(-1);
  if (!start) return [];
  const versions = Object.entries(start.versions).map(([name, v]) => `${name} ${v}`).join(", ");
  const times = run.starts.length > 1 ? `; started ${run.starts.length} times` : "";
  const fork = run.starts.map((one) => one.forked_from).find(Boolean);
  const origin = fork ? `; forked from ${fork}` : "";
  return [element("p", { className: "quiet" }, [`${RUNS.length > 1 ? `${run.name}: ` : ""}${run.path}; ${start.devices}; ${start.system}, ${start.processors} processors, Python ${start.python}; ${versions}${times}${origin}`])];
}

// Links to the Prometheus metrics of vLLM servers.
function metricsOf(urls) {
  const pages = urls.filter((url) => /^https?:/.test(url)).map((url) => `${url.replace(/\/+$/, "")}/metrics`);
  return pages.flatMap((href) => [" \u00b7 ", element("a", { href, rel: "noreferrer", textContent: href })]);
}

function title(run) {
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = `var(--c${run.index % 6})`;
  return element("h3", {}, RUNS.length > 1 ? [swatch, ` ${run.name}`] : [run.name]);
}

// Folds repeats of an alarm that was only logged into its first occurrence.
function markRepeated(events) {
  const first = new Map();
  for (const event of events) {
    const quiet = ["log", "replayed"].includes(event.action), kind = `${event.alarm} ${event.rollback}`;
    event.repeated = quiet && first.has(kind);
    event.repeats = [];
    if (event.repeated) first.get(kind).repeats.push(event.at);
    else if (quiet) first.set(kind, event);
  }
}

// Lists all steps, or the first eight and the last.
function listed(steps) {
  const left = steps.length - 9;
  return left > 1 ? `${steps.slice(0, 8).join(", ")}, ... (${left} more), ${steps.at(-1)}` : steps.join(", ");
}

function alarm(run, event) {
  const done = { log: "", replayed: "", pause: "paused", stop: "stopped", rollback: event.number ? `rollback ${event.number}` : "rolled back" }[event.action] ?? event.action;
  const more = [event.more, event.to == null ? "" : `back to step ${event.to} with ${Object.entries(event.changes).map(([k, [old, now]]) => `${k} ${old} -> ${now}`).join(", ")}`].filter(Boolean).join("; ");
  const said = [`${RUNS.length > 1 ? run.name + ", " : ""}step ${event.at}: ${event.title}`, done, event.rollback ? `discarded by rollback ${event.rollback}` : ""];
  return element("div", { className: `card alarm${event.rollback ? " discarded" : ""}` }, [
    element("h3", {}, [said.filter(Boolean).join(", ")]),
    element("p", {}, [event.text + (event.limit == null ? "" : ` (limit ${shown(event.limit)})`)]),
    ...(more ? [element("p", {}, [more])] : []),
    ...(event.repeats.length ? [element("p", {}, [`Raised again after steps ${listed(event.repeats)}.`])] : []),
    ...(event.causes ? [element("p", { className: "quiet" }, [`Likely: ${event.causes}. Keys: ${event.keys.join(", ")}`])] : []),
  ]);
}

// A table of the config: for several runs the keys that differ, and behind a click all of them.
function configTable(runs) {
  const head = () => element("tr", {}, [element("th", {}, ["key"]), ...runs.map((run) => element("th", {}, [run.name]))]);
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const rows = keys.map((key) => {
    const values = runs.map((run) => JSON.stringify(run.config[key]) ?? "-");
    const row = element("tr", {}, [element("td", {}, [key]), ...values.map((v) => element("td", {}, [v]))]);
    return [row, new Set(values).size > 1];
  });
  const differing = rows.filter(([, differs]) => differs).map(([row]) => row), table = (some) => element("div", { className: "scroll" }, [element("table", {}, [head(), ...some])]);
  const same = rows.filter(([, differs]) => !differs).map(([row]) => row);
  return [
    ...(differing.length ? [element("h3", {}, ["Keys that differ"]), table(differing)] : []),
    element("details", {}, [element("summary", {}, [differing.length ? "the other keys" : "every key"]), table(same)]),
  ];
}

function draw() {
  const runs = RUNS.filter((run) => run.chosen), focus = RUNS[+(document.getElementById("focus")?.value ?? 0)];
  document.getElementById("tiles").replaceChildren(tiles(runs));
  document.getElementById("facts").replaceChildren(...(RUNS.length > 1 ? [] : [facts(RUNS[0])]));
  const events = runs.flatMap((run) => run.alarms.filter((event) => !event.repeated).map((event) => alarm(run, event)));
  document.getElementById("alarm-list").replaceChildren(...(events.length ? events : [element("p", { className: "quiet" }, ["No alarms."])]));
  drawCharts(runs, focus);
  document.getElementById("config-table").replaceChildren(...configTable(runs), ...runs.flatMap(machine));
}

const smoother = element("select", { id: "smoothing" }, [1, 5, 20, 50].map((n) => element("option", { value: String(n), textContent: n === 1 ? "none" : `mean of ${n} steps` })));
smoother.addEventListener("change", () => { smoothing = +smoother.value; draw(); });
document.getElementById("curve-controls").append(element("label", {}, ["Smoothing", smoother]));
if (RUNS.length > 1) {
  const boxes = RUNS.map((run) => {
    const box = element("input", { type: "checkbox", checked: true, id: `run-${run.index}` });
    box.addEventListener("change", () => { run.chosen = box.checked; draw(); });
    const label = title(run);
    return element("label", {}, [box, ...label.childNodes]);
  });
  const focus = element("select", { id: "focus" }, RUNS.map((run, i) => element("option", { value: String(i), textContent: run.name })));
  focus.addEventListener("change", draw);
  document.getElementById("runs").append(...boxes);
  document.getElementById("curve-controls").append(element("label", {}, ["Run for distributions and times", focus]));
}
for (const part of document.querySelectorAll("#completions, nav a[href='#completions']")) part.hidden = !RUNS.some((run) => run.samples.length || run.config["samples.every"] != null);
draw();
drawCompletions();
follow();
