// Before anything is painted: the colours that were chosen. Without a choice the system's hold.
try {
  const theme = localStorage.getItem("sluice-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // The system's, then.
}
