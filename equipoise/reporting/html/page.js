"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const off = { method: new Set(), kind: new Set() };
  // Buttons by name: the library's default set includes one that uploads a chart, and may get others.
  const buttons = [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
  const config = { responsive: true, displaylogo: false, modeBarButtons: buttons, plotlyServerURL: "" };
  const plots = [];

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const axis = (given) => ({ automargin: true, gridcolor: colour("--grid"), zerolinecolor: colour("--grid"), linecolor: colour("--line"), ...given });

  function layout(chart) {
    const heat = chart.data.some((trace) => trace.type === "heatmap");
    return {
      margin: { l: 55, r: heat ? 10 : 15, t: 10, b: 45 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { font: { family: getComputedStyle(document.body).fontFamily } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--link") },
      showlegend: false,
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
      ...chart.layout,
      xaxis: axis(chart.layout.xaxis),
      yaxis: axis(chart.layout.yaxis),
    };
  }

  const visible = (trace) => {
    const of = trace.meta || {};
    return !(of.method !== undefined && off.method.has(String(of.method))) && !(of.kind !== undefined && off.kind.has(of.kind));
  };

  function element(name, text, more) {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    return Object.assign(made, more || {});
  }

  const text = new DOMParser();
  const readable = (given) => text.parseFromString(String(given), "text/html").documentElement.textContent;

  // The points of a chart as a table, for people who cannot see the chart; made when it is opened.
  function points(chart) {
    const table = element("table");
    const head = table.createTHead().insertRow();
    for (const name of ["line", "x", "y"]) head.appendChild(element("th", name, { scope: "col" }));
    const body = table.createTBody();
    for (const trace of chart.data) {
      if (!visible(trace) || trace.hoverinfo === "skip") continue;
      const rows = trace.type === "heatmap"
        ? trace.z.flatMap((row, i) => row.map((z, j) => [`${trace.y ? trace.y[i] : i}, ${trace.x ? trace.x[j] : j}`, z]))
        : (trace.x || []).map((x, i) => [x, trace.y ? trace.y[i] : trace.y0]);
      for (const [x, y] of rows.slice(0, 2000)) {
        const row = body.insertRow();
        for (const value of [trace.name || chart.title, x, y]) {
          row.insertCell().textContent = typeof value === "number" ? String(+value.toPrecision(6)) : readable(value);
        }
      }
    }
    return table;
  }

  function draw(chart, place) {
    const figure = element("figure");
    const caption = element("figcaption");
    caption.append(element("h3", chart.title), element("p", chart.note));
    const plot = element("div", "", { className: "plot" });
    plot.setAttribute("role", "group"); // it contains buttons
    plot.setAttribute("aria-label", `${chart.title}. ${chart.note} The figures are in the table below.`);
    plot.dataset.chart = chart.id;
    if (chart.height) plot.style.height = `${chart.height}px`;
    const details = element("details");
    details.append(element("summary", "Show as a table"));
    details.addEventListener("toggle", () => {
      while (details.childElementCount > 1) details.lastChild.remove();
      if (!details.open) return;
      const scroll = element("div", "", { className: "scroll", tabIndex: 0 });
      scroll.append(points(chart));
      details.append(scroll);
    });
    figure.append(caption, plot, details);
    place.append(figure);
    plots.push({ plot, chart, details });
    return () => Plotly.newPlot(plot, traces(chart), layout(chart), config);
  }

  const traces = (chart) => chart.data.map((trace) => ({ ...trace, visible: visible(trace) }));

  // Create all places first: the width of each depends on their number.
  const drawAll = (charts, place) => Promise.all(charts.map((chart) => draw(chart, place)).map((plot) => plot()));

  const drawn = document.getElementById("drawn");
  async function scene(number) {
    for (const { plot } of plots.filter((each) => drawn.contains(each.plot))) Plotly.purge(plot);
    for (let i = plots.length - 1; i >= 0; i--) if (drawn.contains(plots[i].plot)) plots.splice(i, 1);
    drawn.replaceChildren();
    for (const set of document.querySelectorAll("fieldset.methods")) set.hidden = set.dataset.scene !== String(number);
    await drawAll(figures.scenes[number].charts, drawn);
  }

  // A method may occur in several problems, with a checkbox in each.
  function agree() {
    for (const box of document.querySelectorAll("input[name=method]")) box.checked = !off.method.has(box.value);
  }

  function refresh() {
    for (const { plot, chart, details } of plots) {
      Plotly.restyle(plot, { visible: chart.data.map(visible) });
      details.dispatchEvent(new Event("toggle")); // rebuilds its table if it is open
    }
    for (const row of document.querySelectorAll("#figures-table tbody tr")) row.classList.toggle("off", off.method.has(row.dataset.method));
  }

  for (const box of document.querySelectorAll("input[type=checkbox]")) {
    box.addEventListener("change", () => {
      if (box.checked) off[box.name].delete(box.value); else off[box.name].add(box.value);
      agree();
      refresh();
    });
  }
  for (const button of document.querySelectorAll(".none, .all")) {
    button.addEventListener("click", () => {
      const on = button.classList.contains("all");
      for (const box of button.closest("fieldset").querySelectorAll("input")) {
        box.checked = on;
        if (on) off.method.delete(box.value); else off.method.add(box.value);
      }
      agree();
      refresh();
    });
  }
  document.getElementById("scene").addEventListener("change", (event) => scene(+event.target.value));

  function theme(dark) {
    root.dataset.theme = dark ? "dark" : "light";
    const button = document.getElementById("theme");
    button.setAttribute("aria-pressed", String(dark));
    for (const { plot, chart } of plots) Plotly.react(plot, traces(chart), layout(chart), config);
  }
  const wish = matchMedia("(prefers-color-scheme: dark)");
  wish.addEventListener("change", () => theme(wish.matches));
  document.getElementById("theme").addEventListener("click", () => theme(root.dataset.theme !== "dark"));
  let before = false;
  addEventListener("beforeprint", () => { before = root.dataset.theme === "dark"; theme(false); });
  addEventListener("afterprint", () => theme(before));

  const table = document.getElementById("figures-table");
  for (const button of table.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const at = [...head.parentNode.children].indexOf(head);
      const rising = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentNode.children) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.children[at];
        if (button.dataset.text) return cell.textContent;
        return cell.dataset.value === "" ? null : +cell.dataset.value;
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null || y === null) return (x === null) - (y === null); // missing values come last in both orders
        const order = typeof x === "string" ? x.localeCompare(y) : x - y;
        return rising ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  }

  theme(wish.matches);
  const ready = [scene(0)];
  if (figures.attacks.length) {
    const section = document.getElementById("attacks");
    section.hidden = false;
    document.querySelector('nav a[href="#attacks"]').hidden = false;
    ready.push(drawAll(figures.attacks, document.getElementById("attacked")));
  }
  Promise.all(ready).then(() => { root.dataset.ready = "true"; });
})();
