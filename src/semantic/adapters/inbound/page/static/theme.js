// Sets the chosen theme before the first paint; without a choice, the system's theme applies.
const chosen = localStorage.getItem("semantic.theme");
if (chosen) document.documentElement.dataset.theme = chosen;
