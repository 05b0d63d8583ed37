"use strict";
// Takes the data of the runs; those shown before stay chosen or not.
function take(runs) {
  const before = RUNS;
  RUNS = runs;
  RUNS.forEach((run, index) => { run.index = index; run.chosen = before[index]?.chosen ?? true; markRepeated(run.alarms); });
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
  swatch.style.background = `var(--c${run.index % HUES})`;
  return element("h3", {}, RUNS.length > 1 ? [swatch, ` ${run.name}`] : [run.name]);
}

// Folds repeats of an alarm that was only logged into its first occurrence.
function markRepeated(events) {
  const first = new Map();
  for (const event of events) {
    const quiet = event.action === "log", kind = `${event.alarm} ${event.rollback}`;
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
  const done = { log: "", pause: "paused", stop: "stopped", rollback: event.number ? `rollback ${event.number}` : "rolled back" }[event.action] ?? event.action;
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
    element("details", { id: "all-keys", open: document.getElementById("all-keys")?.open ?? false }, [element("summary", {}, [differing.length ? "the other keys" : "every key"]), table(same)]),
  ];
}

function draw() {
  const runs = RUNS.filter((run) => run.chosen), focus = RUNS[+(document.getElementById("focus")?.value ?? 0)];
  document.getElementById("outcome").textContent = sentence(runs.length ? runs : RUNS);
  document.getElementById("alarm-chip").replaceChildren(chip(runs));
  document.getElementById("tiles").replaceChildren(tiles(runs), ...commands(runs));
  document.getElementById("facts").replaceChildren(...(RUNS.length > 1 ? [] : [facts(RUNS[0])]));
  const events = runs.flatMap((run) => run.alarms.filter((event) => !event.repeated).map((event) => alarm(run, event)));
  document.getElementById("alarm-list").replaceChildren(...events);
  for (const part of document.querySelectorAll("#alarms, nav a[href='#alarms']")) part.hidden = !events.length;
  drawCharts(runs, focus);
  document.getElementById("config-table").replaceChildren(...configTable(runs), ...runs.flatMap(machine));
}

// Draws the whole page.
function show() {
  const sampled = RUNS.some((run) => run.samples.length || run.config["samples.every"] != null);
  for (const part of document.querySelectorAll("#completions, nav a[href='#completions']")) part.hidden = !sampled;
  draw();
  drawHeldOut();
  drawCompletions();
}

take(JSON.parse(document.getElementById("data").textContent));
const smoother = element("select", { id: "smoothing" }, [1, 5, 20, 50].map((n) => element("option", { value: String(n), textContent: n === 1 ? "none" : `mean of ${n} steps` })));
smoother.addEventListener("change", () => { smoothing = +smoother.value; draw(); });
document.getElementById("curve-controls").append(element("label", {}, ["Smoothing", smoother]));
if (RUNS.length > 1) {
  const boxes = RUNS.map((run) => {
    const box = element("input", { type: "checkbox", checked: true, id: `run-${run.index}` });
    box.addEventListener("change", () => { RUNS[run.index].chosen = box.checked; draw(); });
    const label = title(run);
    return element("label", {}, [box, ...label.childNodes]);
  });
  const focus = element("select", { id: "focus" }, RUNS.map((run, i) => element("option", { value: String(i), textContent: run.name })));
  focus.addEventListener("change", draw);
  document.getElementById("runs").append(...boxes);
  document.getElementById("curve-controls").append(element("label", {}, ["Run for distributions and times", focus]));
}
show();
follow();
