"use strict";
let RUNS = []; // the runs of jaxrl/commands/report/collect.py, and the page's own marks on them

function element(tag, properties, children = []) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
