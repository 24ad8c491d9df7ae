/* Draws the plots in the colours of the page, again whenever those change. Without it the page still has every table. */
(function () {
  "use strict";
  var root = document.documentElement;
  var specs = JSON.parse(document.getElementById("plots").textContent);
  var themes = ["auto", "light", "dark"];
  var printing = false;

  function colour(name) { return getComputedStyle(root).getPropertyValue("--" + name).trim(); }

  /* "@name" or "@name/0.2" in a plot is a CSS variable of the page, optionally with an opacity. */
  function paint(value) {
    if (typeof value === "string" && value.charAt(0) === "@") {
      var parts = value.slice(1).split("/");
      var hex = colour(parts[0]);
      if (parts.length === 1) { return hex; }
      var n = parseInt(hex.slice(1), 16);
      return "rgba(" + (n >> 16) + "," + ((n >> 8) & 255) + "," + (n & 255) + "," + parts[1] + ")";
    }
    if (Array.isArray(value)) { return value.map(paint); }
    if (value && typeof value === "object") {
      var copy = {};
      Object.keys(value).forEach(function (key) { copy[key] = paint(value[key]); });
      return copy;
    }
    return value;
  }

  function draw() {
    var narrow = window.innerWidth < 640;
    Object.keys(specs).forEach(function (id) {
      var spec = paint(specs[id]);
      var layout = Object.assign({}, spec.layout, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 13, color: colour("ink") }
      });
      ["xaxis", "yaxis"].forEach(function (axis) {
        layout[axis] = Object.assign({ gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true }, layout[axis]);
      });
      /* A narrow legend has one line per entry; make room for it so that the plot keeps its height. */
      if (narrow && layout.showlegend !== false) { layout.height += 14 * Math.max(0, spec.data.length - 2); }
      document.getElementById(id).style.height = layout.height + "px";
      layout.hoverlabel = { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } };
      var config = { responsive: true, displaylogo: false, displayModeBar: false };
      window.Plotly.react(id, spec.data, layout, config);
    });
    root.setAttribute("data-drawn", String(Object.keys(specs).length));
  }

  var wide = window.innerWidth >= 640;
  window.addEventListener("resize", function () {
    if (wide !== (window.innerWidth >= 640)) { wide = !wide; draw(); }
  });

  var button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", function () {
    var next = themes[(themes.indexOf(button.dataset.theme) + 1) % themes.length];
    button.dataset.theme = next;
    button.textContent = "Theme: " + next;
    if (next === "auto") { root.removeAttribute("data-theme"); } else { root.setAttribute("data-theme", next); }
    draw();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { if (!printing) { draw(); } });
  window.addEventListener("beforeprint", function () {
    printing = true;
    root.dataset.before = root.getAttribute("data-theme") || "";
    root.setAttribute("data-theme", "light");
    draw();
  });
  window.addEventListener("afterprint", function () {
    printing = false;
    if (root.dataset.before) { root.setAttribute("data-theme", root.dataset.before); } else { root.removeAttribute("data-theme"); }
    draw();
  });
  if (window.Plotly) { draw(); }
})();
