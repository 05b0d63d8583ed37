"use strict";
// Sampled completions: a card for each prompt, its different completions side by side. They are
// filtered by run, step and text, sorted by step or reward, and their tokens are coloured.
const view = { run: 0, step: "all", order: "step", tint: "advantages", markers: "folded", search: "" };
const MOST = 30; // prompts shown at once
const TINTS = {
  advantages: { label: "advantage", key: ["worse", "better"] },
  probabilities: { label: "probability", key: ["certain", "unlikely"], note: "This run did not log probabilities." },
  entropies: { label: "entropy", key: ["certain", "undecided"], note: "This step was not probed (probe.every)." },
  betas: { label: "|beta|", key: ["0", "largest"], note: "This step was not probed (probe.every)." },
};

function option(value, text, chosen) {
  return element("option", { value: String(value), textContent: text, selected: String(value) === String(chosen) });
}

function control(label, key, options) {
  const select = element("select", { id: `completion-${key}` }, options);
  select.addEventListener("change", () => {
    view[key] = select.value;
    if (key === "run") view.step = "all";
    drawCompletions();
    if (key === "markers") drawHeldOut();
  });
  return element("label", {}, [label, select]);
}

// After a rollback the same step number occurs twice.
const when = (s) => s.rollback ? `${s.step}, discarded by rollback ${s.rollback}` : String(s.step);
const best = (group) => Math.max(...group.map((s) => s.reward ?? -Infinity));

// The completions of each prompt of each step, in their order.
function grouped(samples) {
  const groups = new Map();
  samples.forEach((sample, i) => {
    sample.anchor ??= `completion-${view.run}-${i}`;
    const key = JSON.stringify([when(sample), sample.group ?? sample.prompt]);
    groups.set(key, [...(groups.get(key) ?? []), sample]);
  });
  return [...groups.values()];
}

function drawControls() {
  const run = RUNS[view.run], steps = [...new Set(run.samples.map(when))];
  const search = element("input", { type: "search", id: "completion-search", placeholder: "search", value: view.search });
  search.addEventListener("input", () => { view.search = search.value; drawList(); });
  document.getElementById("completion-controls").replaceChildren(
    ...(RUNS.length > 1 ? [control("Run", "run", RUNS.map((r, i) => option(i, r.name, view.run)))] : []),
    control("Step", "step", [option("all", "all", view.step), ...steps.map((s) => option(s, s, view.step))]),
    control("Order", "order", [option("step", "newest step first", view.order), option("high", "highest reward first", view.order), option("low", "lowest reward first", view.order)]),
    control("Colour", "tint", Object.entries(TINTS).map(([name, tint]) => option(name, tint.label, view.tint))),
    control("Template", "markers", [option("folded", "folded", view.markers), option("shown", "shown", view.markers)]),
    element("label", {}, ["Text", search]),
  );
}

function drawCompletions() {
  drawControls();
  drawList();
}

function drawList() {
  const run = RUNS[view.run], sought = view.search.toLowerCase();
  const all = grouped(run.samples), said = (s) => `${s.prompt}\n${s.tokens.join("")}\n${s.answer ?? ""}`.toLowerCase();
  const chosen = all.filter((group) => (view.step === "all" || when(group[0]) === view.step) && (!sought || group.some((s) => said(s).includes(sought))));
  const orders = { step: (a, b) => b[0].step - a[0].step || best(b) - best(a), high: (a, b) => best(b) - best(a), low: (a, b) => best(a) - best(b) };
  chosen.sort(orders[view.order]);
  const most = Math.max(1e-12, ...chosen.flat().flatMap((s) => s[view.tint] ?? []).filter((v) => v != null).map(Math.abs));
  drawKey(most);
  const list = document.getElementById("completion-list");
  list.replaceChildren(...chosen.slice(0, MOST).map((group) => prompt(group, most)));
  if (!all.length) list.append(element("p", { className: "quiet" }, ["This run logged no completions (samples.every)."]));
  else if (!chosen.length) list.append(element("p", { className: "quiet" }, ["No completion has this text."]));
  if (chosen.length > MOST) list.append(element("p", { className: "quiet" }, [`${MOST} of ${chosen.length} prompts shown; choose a step or search.`]));
}

// The background of a token with value v, where `most` is the largest size of any.
function tint(v, most) {
  if (v == null) return "";
  if (view.tint === "probabilities") return v > 0.995 ? "" : `rgba(${css("--beta")}, ${(0.08 + 0.6 * (1 - v)).toFixed(3)})`;
  const hue = view.tint === "betas" || view.tint === "entropies" ? "--beta" : v > 0 ? "--up" : "--down";
  return v ? `rgba(${css(hue)}, ${(0.08 + 0.6 * Math.abs(v) / most).toFixed(3)})` : "";
}

function drawKey(most) {
  const [low, high] = TINTS[view.tint].key, ends = { advantages: [-most, most], probabilities: [1, 0], entropies: [0, most], betas: [0, most] }[view.tint];
  const steps = Array.from({ length: 9 }, (_, i) => ends[0] + (ends[1] - ends[0]) * i / 8);
  const boxes = steps.map((v) => { const box = element("span", { className: "key" }); box.style.background = tint(v, most); return box; });
  document.getElementById("colour-key").replaceChildren(`${low} (${shown(ends[0])}) `, ...boxes, ` ${high} (${shown(ends[1])})`);
}

// The different completions of a group, the best first: [[sample, how often]]. Equal ones share an anchor.
function distinct(group) {
  const found = new Map();
  for (const sample of group) {
    const key = JSON.stringify([sample.tokens, sample.reward, sample.length]);
    const [first, count] = found.get(key) ?? [sample, 0];
    sample.anchor = first.anchor;
    found.set(key, [first, count + 1]);
  }
  return [...found.values()].sort(([a], [b]) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
}

// The share of right completions of a prompt, or their mean reward, of all that were sampled.
function passRate(group) {
  const [{ group_size: size, group_mean: mean }] = group;
  if (!size || mean == null) return [];
  const right = binary(group) && Math.abs(mean * size - Math.round(mean * size)) < 1e-6 && mean >= 0 && mean <= 1;
  if (!right) return [element("span", { className: "quiet" }, [`mean reward ${shown(mean)} of ${size}`])];
  return [element("meter", { min: 0, max: 1, value: mean, title: percent(mean) }), element("span", { className: "rate" }, [`${Math.round(mean * size)} of ${size} right`])];
}

function prompt(group, most) {
  const [first] = group, head = `step ${when(first)}, ${group.length === 1 ? "1 completion" : `${group.length} completions of one prompt`}`;
  return element("div", { className: "card prompt-card" }, [
    element("div", { className: "prompt-head" }, [element("h3", {}, [head]), ...passRate(group)]),
    question(first),
    element("div", { className: "siblings" }, distinct(group).map(([s, count]) => completion(s, count, most))),
  ]);
}

function completion(s, count, most) {
  const advantage = s.advantages.find((v) => v != null), parts = Object.entries(s.parts ?? {});
  const numbers = [["reward", s.reward == null ? "failed" : shown(s.reward)], ...(parts.length > 1 ? parts.map(([name, v]) => [name, shown(v)]) : []), ["advantage", shown(advantage)], ["tokens", `${s.length}${s.truncated ? ", truncated" : ""}`]];
  const token = (role) => (i) => {
    const span = element("span", { className: ["observation", "tool", "user", "system"].includes(role) || s.advantages[i] == null ? "token observed" : "token", textContent: s.tokens[i] });
    span.style.background = tint(s[view.tint]?.[i], most);
    const known = [["advantage", s.advantages], ["probability", s.probabilities], ["entropy", s.entropies], ["beta", s.betas]].filter(([, values]) => values?.[i] != null);
    span.dataset.tip = [JSON.stringify(s.tokens[i]), ...known.map(([name, values]) => `${name} ${shown(values[i])}`)].join("\n");
    return span;
  };
  const said = tokenTurns(s), rest = s.length - s.tokens.length;
  const bubbles = said.map(([role, tokens]) => bubble(said.length > 1 ? role : "", tokens.map(token(role))));
  if (rest > 0) bubbles.push(element("p", { className: "quiet" }, [`... ${rest} more tokens`]));
  return element("div", { className: "completion", id: s.anchor }, [
    element("p", { className: "numbers" }, [
      ...numbers.flatMap(([name, value]) => [element("span", { className: "quiet" }, [`${name} `]), `${value}  `]),
      ...(count > 1 ? [element("span", { className: "chip" }, [`\u00d7 ${count}`]), "  "] : []),
      element("a", { href: `#${s.anchor}`, title: "link to this completion" }, ["#"]),
    ]),
    ...(s[view.tint] ? [] : [element("p", { className: "quiet" }, [TINTS[view.tint].note])]),
    ...bubbles,
  ]);
}

// A link to a completion shows it, whatever the filters were.
function follow() {
  const [, run, index] = /^#completion-(\d+)-(\d+)$/.exec(location.hash) ?? [], sample = RUNS[run]?.samples[index];
  if (!sample) return;
  if (!document.getElementById(sample.anchor ?? "")) {
    Object.assign(view, { run: +run, step: when(sample), search: "" });
    drawCompletions();
  }
  document.querySelector(".linked")?.classList.remove("linked");
  const card = document.getElementById(sample.anchor);
  card?.classList.add("linked");
  card?.scrollIntoView({ block: "center" });
}
addEventListener("hashchange", follow);

const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const text = event.target.dataset?.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
});
