"use strict";
// Names of the curves at their ends, and one readout for all curves at the cursor.
const LINE = 13; // height of a label
const FONT = "11px system-ui, sans-serif";
const pen = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  pen.font = FONT;
  return pen.measureText(text).width;
}

// A text cut in its middle to a width.
function fitted(text, width) {
  let size = text.length;
  const cut = () => size >= text.length ? text : `${text.slice(0, Math.ceil(size / 2))}\u2026${text.slice(text.length - Math.floor(size / 2))}`;
  while (size > 2 && textWidth(cut()) > width) size--;
  return cut();
}

// Places on an axis from 0 to `height`, at least LINE apart and near the wanted ones, which ascend.
function apart(wanted, height) {
  const places = [];
  for (const y of wanted) places.push(Math.max(y, (places.at(-1) ?? -Infinity) + LINE));
  for (let i = places.length - 1, most = height; i >= 0; i--, most -= LINE) places[i] = Math.min(places[i], most);
  return places;
}

// The room that the labels of a chart take at the right, and a label with its value if it fits.
const labelRoom = (series, width) => Math.min(0.34 * width, 11 + Math.max(0, ...series.map((one) => one.ends == null ? 0 : textWidth(one.ends))));
const labelOf = (one, room) => textWidth(one.ends) <= room ? one.ends : fitted(one.ends.endsWith("(exact)") ? one.ends : one.label, room);

// A hook of uPlot. Where the right side has an axis, the labels stand inside, over the lines.
function endLabels(u) {
  const { ctx, bbox } = u, ratio = devicePixelRatio, inside = u.series.some((one) => one.scale === "right");
  const height = bbox.height / ratio, room = labelRoom(u.series, u.width), found = [];
  u.series.forEach((one, i) => {
    if (one.ends == null || !one.show) return;
    const values = u.data[i];
    let last = values.length - 1;
    while (last >= 0 && values[last] == null) last--;
    // On a logarithmic axis 0 lies below everything.
    const y = last < 0 ? bbox.top + bbox.height : u.valToPos(values[last], one.scale, true);
    found.push({ text: labelOf(one, inside ? u.width / 2 : room - 11), y: Math.min(height, Math.max(0, (y - bbox.top) / ratio)), hue: one.stroke ?? (() => css("--ink")) });
  });
  // Too many for the height: runs are named in the page's head, and the readout names all.
  if (found.length * LINE > height + LINE) return;
  found.sort((a, b) => a.y - b.y);
  const places = apart(found.map(({ y }) => inside ? y - LINE / 2 - 4 : y), height);
  ctx.save();
  ctx.scale(ratio, ratio);
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  ctx.textAlign = inside ? "right" : "left";
  ctx.lineWidth = 3;
  ctx.lineJoin = "round";
  ctx.strokeStyle = css("--card");
  const x = (bbox.left + bbox.width) / ratio + (inside ? -4 : 9);
  found.forEach(({ text, hue }, i) => {
    const y = bbox.top / ratio + Math.max(LINE / 2, places[i]);
    ctx.strokeText(text, x, y);
    ctx.fillStyle = typeof hue === "function" ? hue() : hue;
    ctx.fillText(text, x, y);
  });
  ctx.restore();
}

const readout = document.getElementById("readout");

// The values of all curves of the chart under the mouse, the largest first.
function showReadout(u) {
  if (!u.over.matches(":hover")) return;
  const { idx, left, top } = u.cursor;
  readout.hidden = idx == null || left < 0;
  if (readout.hidden) return;
  const rows = u.series.slice(1).map((one, i) => ({ one, value: one.reads?.(u.data[0][idx]), i })).filter(({ value }) => value != null);
  if (!u.ordered) rows.sort((a, b) => b.value - a.value);
  readout.replaceChildren(element("div", { className: "strong" }, [`step ${u.data[0][idx]}`]), ...rows.map(({ one, value }) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = typeof one.stroke === "function" ? one.stroke() : one.stroke;
    return element("div", { className: "row" }, [swatch, element("span", { className: "name" }, [one.label]), element("span", { className: "number" }, [one.says(value)])]);
  }));
  const box = u.over.getBoundingClientRect(), x = box.left + left, y = box.top + top;
  readout.style.left = `${Math.max(8, x + 16 + readout.offsetWidth < innerWidth ? x + 16 : x - readout.offsetWidth - 16)}px`;
  readout.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - readout.offsetHeight - 8))}px`;
}
