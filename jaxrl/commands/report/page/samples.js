"use strict";
// Sampled completions: filtered by run and step, sorted by step or reward, with coloured tokens.
const view = { run: 0, step: "all", order: "step", tint: "advantages" };

function option(value, text, chosen) {
  return element("option", { value: String(value), textContent: text, selected: String(value) === String(chosen) });
}

function control(label, key, options) {
  const select = element("select", { id: `completion-${key}` }, options);
  select.addEventListener("change", () => {
    view[key] = select.value;
    if (key === "run") view.step = "all";
    drawCompletions();
  });
  return element("label", {}, [label, select]);
}

// After a rollback the same step number occurs twice.
const when = (s) => s.rollback ? `${s.step}, discarded by rollback ${s.rollback}` : String(s.step);

function drawCompletions() {
  const run = RUNS[view.run], steps = [...new Set(run.samples.map(when))];
  document.getElementById("completion-controls").replaceChildren(
    ...(RUNS.length > 1 ? [control("Run", "run", RUNS.map((r, i) => option(i, r.name, view.run)))] : []),
    control("Step", "step", [option("all", "all", view.step), ...steps.map((s) => option(s, s, view.step))]),
    control("Order", "order", [option("step", "newest step first", view.order), option("high", "highest reward first", view.order), option("low", "lowest reward first", view.order)]),
    control("Colour", "tint", [option("advantages", "advantage", view.tint), option("betas", "|beta|", view.tint)]),
  );
  const chosen = run.samples.filter((s) => view.step === "all" || when(s) === view.step);
  const reward = (s) => s.reward ?? -Infinity;
  const orders = { step: (a, b) => b.step - a.step || reward(b) - reward(a), high: (a, b) => reward(b) - reward(a), low: (a, b) => reward(a) - reward(b) };
  chosen.sort(orders[view.order]);
  const values = chosen.flatMap((s) => s[view.tint] ?? []).filter((v) => v != null).map(Math.abs);
  const most = Math.max(1e-12, ...values);
  const list = document.getElementById("completion-list");
  list.replaceChildren(...chosen.slice(0, 60).map((s) => completion(s, most)));
  if (!chosen.length) list.append(element("p", { className: "quiet" }, ["This run logged no completions (samples.every)."]));
  if (chosen.length > 60) list.append(element("p", { className: "quiet" }, [`60 of ${chosen.length} shown; choose a step to narrow the list.`]));
}

function completion(s, most) {
  const known = s[view.tint];
  const head = `step ${when(s)}, reward ${s.reward == null ? "failed" : shown(s.reward)}, ${s.length} tokens${s.truncated ? ", truncated" : ""}`;
  const tokens = s.tokens.map((text, i) => {
    const span = element("span", { className: "token", textContent: text });
    const v = known?.[i], hue = view.tint === "betas" ? "--beta" : v > 0 ? "--up" : "--down";
    if (v) span.style.background = `rgba(${css(hue)}, ${(0.08 + 0.6 * Math.abs(v) / most).toFixed(3)})`;
    span.dataset.tip = `${JSON.stringify(text)}\nadvantage ${shown(s.advantages[i])}` + (s.betas ? `\nbeta ${shown(s.betas[i])}` : "");
    return span;
  });
  const rest = s.length - s.tokens.length;
  return element("div", { className: "card completion" }, [
    element("h3", {}, [head]),
    ...(view.tint === "betas" && !s.betas ? [element("p", { className: "quiet" }, ["This step was not probed (probe.every)."])] : []),
    element("pre", { className: "prompt", textContent: s.prompt }),
    element("pre", {}, [...tokens, ...(rest > 0 ? [element("span", { className: "quiet" }, [` ... ${rest} more`])] : [])]),
  ]);
}

const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const text = event.target.dataset?.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
});
