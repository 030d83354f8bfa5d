// Makes the page of a report alive: sortable tables, selectors, one chart of any metric.
// The page is complete without it. Plotly is in the page, in a script of its own.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const chart = document.getElementById("chart");
  const explore = document.getElementById("explore");
  const chosen = {};

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const select = (id, options, value) => {
    const made = element("select", { id });
    for (const [key, text] of options) made.append(element("option", { value: key, textContent: text }));
    made.value = value;
    return made;
  };
  const titled = (text, control) => element("label", {}, text + " ", control);

  // -- tables: a click on a heading sorts, another turns it round ---------------------------------
  const asNumber = (text) => {
    const number = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(number) ? null : number;
  };
  const sort = (table, column, heading) => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    const text = (row) => row.cells[column].textContent.trim();
    const isNumeric = heading.classList.contains("number");
    const order = (a, b) => {
      if (!isNumeric) return text(a).localeCompare(text(b), undefined, { numeric: true });
      const [x, y] = [asNumber(text(a)), asNumber(text(b))];
      return x === null ? 1 : y === null ? -1 : x - y;  // what was not measured is last
    };
    rows.sort((a, b) => {
      const found = order(a, b);
      const isMissing = isNumeric && (asNumber(text(a)) === null || asNumber(text(b)) === null);
      return down && !isMissing ? -found : found;
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table")) {
    if (!table.tHead || table.tBodies[0].rows.length < 2) continue;
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      heading.tabIndex = 0;
      heading.classList.add("sortable");
      heading.addEventListener("click", () => sort(table, column, heading));
      heading.addEventListener("keydown", (event) => {
        if (event.key === "Enter") sort(table, column, heading);
      });
    });
  }

  // -- selectors: a value of a swept key, for the first table and the chart -----------------------
  const results = document.querySelector("#results ~ .scroll table");
  [...results.tBodies[0].rows].forEach((row, i) => { row.dataset.row = i; });
  const isShown = (row) =>
    Object.entries(chosen).every(([key, value]) => value === "" || row.settings[key] === value);
  const show = () => {
    for (const row of results.tBodies[0].rows) row.hidden = !isShown(data.rows[row.dataset.row]);
    draw();
  };
  const selectors = document.getElementById("selectors");
  for (const [key, values] of Object.entries(data.keys)) {
    if (values.length < 2) continue;
    const name = key.split(".").pop();
    const made = select(`only-${name}`, [["", "all"], ...values.map((one) => [one, one])], "");
    made.addEventListener("change", () => { chosen[key] = made.value; show(); });
    selectors.append(titled(name, made));
  }

  // -- the chart -----------------------------------------------------------------------------------
  const metricTitle = (name) => data.metrics[name].title;
  const metricOptions = Object.keys(data.metrics).map((name) => [name, metricTitle(name)]);
  const keyOptions = Object.keys(data.keys).filter((key) => data.keys[key].length > 1)
    .map((key) => [key, key]);
  const first = (wanted, options) =>
    wanted.find((one) => options.some(([key]) => key === one)) ?? options[0][0];
  const y = select("y", metricOptions, first(["p99_ttft_ms", "median_ttft_ms"], metricOptions));
  const xOptions = [...keyOptions, ...metricOptions];
  const x = select("x", xOptions, first([data.rate, ...keyOptions.map(([key]) => key)], xOptions));
  const logarithmic = element("input", { type: "checkbox", id: "log", checked: true });
  const valueOf = (row, axis) => {
    if (axis in data.metrics) {
      const [mean, half] = row.metrics[axis];
      const scale = data.metrics[axis].scale;
      return [mean === null ? null : mean * scale, half === null ? null : half * scale];
    }
    const text = row.settings[axis] ?? "-";
    const number = Number(text);
    return [text !== "" && Number.isFinite(number) ? number : text, null];
  };
  const curveOf = (row) =>
    Object.entries(row.settings)
      .filter(([key]) => key !== x.value && !(x.value in data.metrics && key === data.rate))
      .filter(([key]) => data.keys[key].length > 1)
      .map(([key, value]) =>
        key === "policy" || key === "folder" ? value : `${key.split(".").pop()}=${value}`)
      .join(", ") || row.policy;
  const COLORS = data.colors;
  const draw = () => {
    const curves = new Map();
    for (const row of data.rows) {
      if (!isShown(row)) continue;
      const name = curveOf(row);
      if (!curves.has(name)) curves.set(name, []);
      curves.get(name).push(row);
    }
    const traces = [...curves].map(([name, rows], i) => {
      const points = rows.map((row) => ({ row, x: valueOf(row, x.value)[0], y: valueOf(row, y.value) }))
        .filter((point) => point.x !== null && point.y[0] !== null);
      if (points.every((point) => typeof point.x === "number")) points.sort((a, b) => a.x - b.x);
      const isText = points.some((point) => typeof point.x === "string");
      return {
        name,
        mode: isText ? "markers" : "lines+markers",
        x: points.map((point) => point.x),
        y: points.map((point) => point.y[0]),
        error_y: { type: "data", array: points.map((point) => point.y[1] ?? 0), thickness: 1 },
        text: points.map((point) => point.row.label),
        hovertemplate: "%{text}<br>%{y:,.4~r} at %{x}<extra></extra>",
        line: { color: COLORS[i % COLORS.length] },
        marker: {
          size: 8, symbol: i % 8, color: COLORS[i % COLORS.length],
          opacity: points.map((point) => (point.row.saturated ? 0.4 : 1)),
        },
      };
    });
    const title = (axis) => ({
      text: axis in data.metrics ? metricTitle(axis)
        : axis === data.rate ? "request rate (requests/s)" : axis,
    });
    const scale = logarithmic.checked ? { type: "log", dtick: "D2", tickformat: ",~g" } : { type: "linear" };
    Plotly.react(chart, traces, {
      margin: { t: 20, r: 20, b: 60, l: 70 }, height: 460, hovermode: "closest",
      paper_bgcolor: "#fff", plot_bgcolor: "#fff",
      xaxis: { title: title(x.value), gridcolor: "#ddd" },
      yaxis: { title: title(y.value), gridcolor: "#ddd", ...scale },
      legend: { orientation: "h", y: -0.2 }, showlegend: true,
    }, {
      displaylogo: false, responsive: true, toImageButtonOptions: { format: "svg" },
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],  // nothing that asks a server
    });
  };
  for (const control of [x, y, logarithmic]) control.addEventListener("change", draw);

  // -- downloads -----------------------------------------------------------------------------------
  const save = (text, name, type) => {
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    URL.revokeObjectURL(link.href);
  };
  const cell = (value) => (/[",\n]/.test(value) ? `"${value.replace(/"/g, '""')}"` : value);
  const csv = () => {
    const keys = Object.keys(data.keys);
    const names = Object.keys(data.metrics);
    const header = ["label", ...keys, ...names.flatMap((name) => [name, `${name}_ci95`])];
    const lines = data.rows.filter(isShown).map((row) => [
      row.label, ...keys.map((key) => row.settings[key] ?? ""),
      ...names.flatMap((name) => row.metrics[name].map((value) => (value === null ? "" : String(value)))),
    ]);
    return [header, ...lines].map((line) => line.map(cell).join(",")).join("\n") + "\n";
  };
  window.schedlabCsv = csv;
  const buttonSvg = element("button", { type: "button", textContent: "Download SVG" });
  buttonSvg.addEventListener("click", () =>
    Plotly.downloadImage(chart, { format: "svg", filename: data.name, width: 900, height: 460 }));
  const buttonCsv = element("button", { type: "button", textContent: "Download CSV" });
  buttonCsv.addEventListener("click", () => save(csv(), `${data.name}.csv`, "text/csv"));
  document.getElementById("axes").append(
    titled("y", y), titled("x", x), titled("logarithmic", logarithmic), buttonSvg, buttonCsv);
  for (const image of document.querySelectorAll("figure img")) {
    const link = element("a", { href: image.src, download: `${image.alt}.${image.src.includes("svg") ? "svg" : "png"}`,
      textContent: "download", className: "download" });
    image.after(link);
  }
  explore.hidden = false;
  draw();
})();
