// The version switcher of the sidebar, and a filter above long tables. No network is used.
(function () {
  function switcher() {
    const place = document.getElementById("version-switcher");
    const versions = window.MODULAR_KERNEL_VERSIONS; // from versions.js beside the version's folder
    if (!place || !versions || versions.length < 2) return;
    const current = place.dataset.version;
    const select = document.createElement("select");
    select.setAttribute("aria-label", "Version of the documentation");
    for (const version of versions) {
      select.add(new Option(version, version, version === current, version === current));
    }
    select.addEventListener("change", function () {
      location.href = place.dataset.root + "../" + select.value + "/index.html";
    });
    place.replaceChildren(select);
  }

  function filter(table) {
    const rows = Array.from(table.tBodies[0].rows);
    if (rows.length < 12) return;
    const input = document.createElement("input");
    input.type = "search";
    input.className = "table-filter";
    input.placeholder = "Filter " + rows.length + " rows, for example by a part";
    input.setAttribute("aria-label", "Filter the rows of this table");
    input.addEventListener("input", function () {
      const words = input.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    const frame = table.closest(".table-wrapper") || table;
    frame.parentNode.insertBefore(input, frame);
  }

  document.addEventListener("DOMContentLoaded", function () {
    switcher();
    document.querySelectorAll("article table.docutils").forEach(filter);
  });
})();
