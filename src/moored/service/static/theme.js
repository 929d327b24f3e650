// Before the first paint, so that it has the chosen colours.
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // a browser that stores nothing
}
