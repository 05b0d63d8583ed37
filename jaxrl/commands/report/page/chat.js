"use strict";
// Reads the turns of a chat out of its text. The markers of the template are folded away.
const ROLES = { model: "assistant", ipython: "tool", environment: "tool", computer: "tool", developer: "system" };
// Each marker begins a turn of a role, ends one (null), or is noise within it (undefined).
const MARKERS = [
  [String.raw`<\|im_start\|>(?<chatml>[\w ]+)\n`, (m) => m.chatml],
  [String.raw`<\|start_header_id\|>(?<llama>[\w ]+)<\|end_header_id\|>\s*`, (m) => m.llama],
  [String.raw`<start_of_turn>(?<gemma>\w+)\n`, (m) => m.gemma],
  [String.raw`<\|start\|>(?<harmony>[\w.]+)[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>`, (m) => m.harmony],
  [String.raw`<\|(?<plain>system|user|assistant|tool)\|>\n?`, (m) => m.plain],
  [String.raw`<｜(?<deepseek>User|Assistant)｜>`, (m) => m.deepseek.toLowerCase()],
  [String.raw`(?<asked>\[INST\])\s?`, () => "user"],
  [String.raw`(?<answered>\[/INST\])\s?`, () => "assistant"],
  [String.raw`(?<thinks><think>)\n?`, () => "thinking"],
  [String.raw`(?<thought></think>)\s*`, () => "assistant"],
  [String.raw`(?<calls><tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool▁calls▁begin｜>)\n?`, () => "tool call"],
  [String.raw`(?<called></tool_call>|<｜tool▁calls▁end｜>)\n?`, () => "assistant"],
  [String.raw`(?<results><tool_response>|\[TOOL_RESULTS\]|<｜tool▁outputs▁begin｜>)\n?`, () => "tool"],
  [String.raw`(?<resulted>\n?</tool_response>|\[/TOOL_RESULTS\]|<｜tool▁outputs▁end｜>)\n?`, () => null],
  [String.raw`(?<ended><\|im_end\|>|<end_of_turn>|<\|eo[tm]_id\|>|<\|(?:end|return|call|endoftext)\|>|<｜end▁of▁sentence｜>|</s>)\n?`, () => null],
  [String.raw`(?<noise><bos>|<s>|<\|begin_of_text\|>|<｜[^｜<>]{1,40}｜>)`, () => undefined],
];
const MARKER = new RegExp(MARKERS.map(([pattern]) => pattern).join("|"), "g");

// The turns of a text that begins in the turn of `role`: [{role, start, end}] by character, without
// markers and without turns of white space alone.
function turns(text, role) {
  const found = [];
  let start = 0;
  const close = (end) => {
    if (text.slice(start, end).trim()) found.push({ role: ROLES[role] ?? role ?? "", start, end });
  };
  for (const match of text.matchAll(MARKER)) {
    const [, next] = MARKERS.find(([pattern]) => match.groups[/\?<(\w+)>/.exec(pattern)[1]] != null);
    close(match.index);
    start = match.index + match[0].length;
    const begun = next(match.groups);
    if (begun !== undefined) role = begun;
  }
  close(text.length);
  return found;
}

// A turn on the page. Plain text without roles has no label.
function bubble(role, content) {
  const label = role ? [element("div", { className: "role" }, [role])] : [];
  return element("div", { className: `bubble ${role.replace(" ", "-") || "plain"}` }, [...label, element("pre", {}, content)]);
}

const promptTurns = (text) => view.markers === "shown" ? [{ role: "", start: 0, end: text.length }] : turns(text, "");

// The prompt of a sample, with the reference answer.
function question({ prompt: text, answer }) {
  return element("div", { className: "question" }, [
    element("div", { className: "prompt" }, promptTurns(text).map(({ role, start, end }) => bubble(role, [text.slice(start, end)]))),
    ...(answer == null ? [] : [element("p", { className: "answer" }, ["reference answer ", element("code", {}, [answer])])]),
  ]);
}

// The turns of a completion: [[role, indices of its tokens]]; tokens of markers are in none.
function tokenTurns(sample) {
  // The policy chose a token with an advantage; others come from the environment.
  const text = sample.tokens.join(""), acted = sample.actions ?? sample.advantages?.map((v) => v != null);
  const chosen = (i) => !acted || !acted.includes(true) || acted[i];
  const read = view.markers === "shown" ? [{ role: "assistant", start: 0, end: text.length }] : turns(text, "assistant");
  const found = [];
  let at = 0, turn = 0;
  sample.tokens.forEach((token, i) => {
    const end = at + token.length;
    while (turn < read.length - 1 && read[turn].end <= at) turn++;
    const inside = read[turn] && end > read[turn].start && at < read[turn].end;
    if (inside || (!token && read[turn])) {
      const role = !chosen(i) && read[turn].role === "assistant" ? "observation" : read[turn].role;
      const last = found.at(-1);
      if (last && last[0] === role && last[2] === turn) last[1].push(i); else found.push([role, [i], turn]);
    }
    at = end;
  });
  return found;
}
