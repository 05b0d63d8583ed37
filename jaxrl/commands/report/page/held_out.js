"use strict";
// The same held-out prompts at the first evaluation and at another one, side by side.
const then = { run: 0, at: null }; // the chosen run, and the evaluation (null: the newest)

const binary = (samples) => samples.every((s) => s.reward == null || s.reward === 0 || s.reward === 1);
const verdict = (s, right) => s.reward == null ? "failed" : right ? (s.reward ? "right" : "wrong") : `reward ${shown(s.reward)}`;

// The words of two texts: [[text, differs]] of each, by their longest common subsequence.
function differing(a, b) {
  const [left, right] = [a, b].map((text) => text.match(/\w+|\s+|[^\w\s]/gu)?.slice(0, 600) ?? []);
  const rows = left.length + 1, columns = right.length + 1, best = new Uint16Array(rows * columns);
  for (let i = rows - 2; i >= 0; i--) for (let j = columns - 2; j >= 0; j--) {
    best[i * columns + j] = left[i] === right[j] ? best[(i + 1) * columns + j + 1] + 1 : Math.max(best[(i + 1) * columns + j], best[i * columns + j + 1]);
  }
  const found = [[], []];
  const put = (side, word, differs) => {
    const last = found[side].at(-1);
    if (last && last[1] === differs) last[0] += word; else found[side].push([word, differs]);
  };
  let i = 0, j = 0;
  while (i < left.length || j < right.length) {
    if (i < left.length && j < right.length && left[i] === right[j]) { put(0, left[i++], false); put(1, right[j++], false); }
    else if (j >= right.length || (i < left.length && best[(i + 1) * columns + j] >= best[i * columns + j + 1])) put(0, left[i++], true);
    else put(1, right[j++], true);
  }
  return found;
}

const spoken = (s) => tokenTurns(s).map(([role, tokens]) => [role, tokens.map((i) => s.tokens[i]).join("")]);

function side(s, other, place, right) {
  const said = spoken(s), against = spoken(other);
  const parts = said.map(([role, text], i) => {
    const pair = place === 0 ? [text, against[i]?.[1] ?? ""] : [against[i]?.[1] ?? "", text];
    const words = differing(...pair)[place].map(([word, differs]) => differs && word.trim() ? element("mark", {}, [word]) : word);
    return bubble(said.length > 1 ? role : "", words);
  });
  const kind = right && s.reward != null ? (s.reward ? " right" : " wrong") : "";
  return element("div", { className: "side" }, [
    element("p", { className: "numbers" }, [element("span", { className: "quiet" }, [`step ${s.step} `]), element("span", { className: `verdict${kind}` }, [verdict(s, right)])]),
    ...parts,
  ]);
}

function drawHeldOut() {
  const known = RUNS.filter((run) => run.held_out.length);
  for (const part of document.querySelectorAll("#then-and-now, nav a[href='#then-and-now']")) part.hidden = !known.length;
  if (!known.length) return;
  const run = known.includes(RUNS[then.run]) ? RUNS[then.run] : known[0];
  const steps = [...new Set(run.held_out.map((s) => s.step))].sort((a, b) => a - b);
  const at = Math.min(then.at ?? Infinity, steps.length - 1);
  const chooser = element("select", { id: "then-run" }, known.map((one) => option(one.index, one.name, run.index)));
  chooser.addEventListener("change", () => { then.run = +chooser.value; then.at = null; drawHeldOut(); });
  const slider = element("input", { type: "range", id: "then-step", min: "0", max: String(steps.length - 1), value: String(at) }), word = element("span", { className: "strong" });
  slider.addEventListener("input", () => { then.at = +slider.value === steps.length - 1 ? null : +slider.value; pairs(); });
  document.getElementById("then-controls").replaceChildren(
    ...(known.length > 1 ? [element("label", {}, ["Run", chooser])] : []),
    ...(steps.length > 1 ? [element("label", { className: "slider" }, ["Step", slider, word])] : []),
  );

  function pairs() {
    const step = steps[Math.min(then.at ?? Infinity, steps.length - 1)], of = (step) => new Map(run.held_out.filter((s) => s.step === step).map((s) => [s.group, s]));
    const [first, now] = [of(steps[0]), of(step)], right = binary(run.held_out);
    word.textContent = String(step);
    const both = [...now.values()].filter((s) => first.has(s.group)).map((s) => [first.get(s.group), s]);
    // Those that changed come first, and of them the better ones.
    const gain = ([a, b]) => (b.reward ?? 0) - (a.reward ?? 0);
    both.sort((a, b) => Math.abs(gain(b)) - Math.abs(gain(a)) || gain(b) - gain(a));
    const cards = both.map(([a, b]) => element("div", { className: "card pair" }, [
      question(b),
      element("div", { className: "sides" }, [side(a, b, 0, right), ...(step === steps[0] ? [] : [side(b, a, 1, right)])]),
    ]));
    document.getElementById("then-list").replaceChildren(...cards);
  }
  pairs();
}
