"use strict";
// Function declarations are hoisted; RUNS is filled before anything is drawn.
var RUNS = JSON.parse(document.getElementById("data").textContent);
RUNS.forEach((run, index) => { run.index = index; run.chosen = true; markRepeated(run.alarms); });

function element(tag, properties, children = []) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function facts(run) {
  const start = run.starts.at(-1), last = (metric) => run.series[metric]?.[1].at(-1), first = (metric) => run.series[metric]?.[1][0];
  const change = (metric) => run.series[metric] ? `${shown(first(metric))} to ${shown(last(metric))}` : null;
  const versions = start ? Object.entries(start.versions).map(([name, v]) => `${name} ${v}`).join(", ") : null;
  const rows = {
    "steps": `${run.last_step} of ${run.config["train.steps"] ?? "?"}`, "reward": change("reward"), "held-out": change("eval/accuracy"),
    "loss": run.config["loss.name"], "precision": run.config.precision, "model": run.config["model.path"], "sampler": run.config["sampler.name"],
    "alarms": String(run.alarms.length), "devices": start?.devices, "system": start ? `${start.system}, ${start.processors} processors, Python ${start.python}` : null,
    "versions": versions, "server's metrics": metricsOf(run.config["sampler.url"] ?? []), "started": run.starts.length > 1 ? `${run.starts.length} times` : null, "directory": run.path,
  };
  const list = Object.entries(rows).filter(([, v]) => v?.length).flatMap(([k, v]) => [element("dt", {}, [k]), element("dd", {}, [v].flat())]);
  return element("div", { className: "card" }, [title(run), element("dl", {}, list)]);
}

// Links to the Prometheus metrics of vLLM servers.
function metricsOf(urls) {
  const pages = urls.filter((url) => /^https?:/.test(url)).map((url) => `${url.replace(/\/+$/, "")}/metrics`);
  return pages.flatMap((href) => [element("a", { href, rel: "noreferrer", textContent: href }), " "]);
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

function configTable(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const rows = keys.map((key) => {
    const values = runs.map((run) => JSON.stringify(run.config[key]) ?? "-");
    return element("tr", { className: new Set(values).size > 1 ? "differs" : "" }, [element("td", {}, [key]), ...values.map((v) => element("td", {}, [v]))]);
  });
  const head = element("tr", {}, [element("th", {}, ["key"]), ...runs.map((run) => element("th", {}, [run.name]))]);
  return element("div", { className: "scroll" }, [element("table", {}, [head, ...rows])]);
}

function draw() {
  const runs = RUNS.filter((run) => run.chosen), focus = RUNS[+(document.getElementById("focus")?.value ?? 0)];
  document.getElementById("overview").replaceChildren(element("div", { className: "facts" }, runs.map(facts)));
  const events = runs.flatMap((run) => run.alarms.filter((event) => !event.repeated).map((event) => alarm(run, event)));
  document.getElementById("alarm-list").replaceChildren(...(events.length ? events : [element("p", { className: "quiet" }, ["No alarms."])]));
  drawCharts(runs, focus);
  document.getElementById("config-table").replaceChildren(element("details", {}, [element("summary", {}, ["every key"]), configTable(runs)]));
}

if (RUNS.length > 1) {
  const boxes = RUNS.map((run) => {
    const box = element("input", { type: "checkbox", checked: true, id: `run-${run.index}` });
    box.addEventListener("change", () => { run.chosen = box.checked; draw(); });
    const label = title(run);
    return element("label", {}, [box, ...label.childNodes]);
  });
  const focus = element("select", { id: "focus" }, RUNS.map((run, i) => element("option", { value: String(i), textContent: run.name })));
  focus.addEventListener("change", draw);
  document.getElementById("runs").append(...boxes, element("label", {}, ["Run for distributions and times:", focus]));
}
draw();
drawCompletions();
