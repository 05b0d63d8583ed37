"use strict";
// uPlot formats numbers in the browser's language. In the locale POSIX, as containers have it, a
// browser may name one that no browser knows ("en-US@posix").
try {
  Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
