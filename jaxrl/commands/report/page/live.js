"use strict";
// The page of a running run asks its server for new data; what the reader chose stays.
const live = document.getElementById("live");
let EVERY = 2000; // milliseconds between two questions
let version = live.dataset.version;

async function renew() {
  // Not while the reader drags a slider or searches.
  if (document.querySelector("input:active, input[type='search']:focus")) return void setTimeout(renew, EVERY);
  try {
    // A relative address is refused where the page's own has a key in it, http://any:KEY@host.
    const data = location.origin + location.pathname.replace(/[^/]*$/, "data");
    const answer = await fetch(`${data}?since=${encodeURIComponent(version)}`);
    if (answer.status === 200) {
      const found = await answer.json(), named = (runs) => JSON.stringify(runs.map((run) => run.name));
      if (named(found.runs) !== named(RUNS)) return void location.reload(); // a service has a new run
      version = found.version;
      CHARTS = found.charts;
      const place = scrollY;
      take(found.runs);
      show();
      scrollTo(0, place);
    }
    live.textContent = answer.ok ? "live" : "cannot be read";
  } catch {
    live.textContent = "not served any more";
  }
  setTimeout(renew, EVERY);
}
if (version) {
  live.hidden = false;
  setTimeout(renew, EVERY);
}
