// Before the first paint: the colours somebody chose, or the system's.
const chosen = localStorage.getItem("semantic.theme");
if (chosen) document.documentElement.dataset.theme = chosen;
