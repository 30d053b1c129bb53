for (const picture of document.querySelectorAll(".matrix")) {
  const data = JSON.parse(picture.querySelector("script").textContent);
  const [scheme, ranks] = picture.querySelectorAll("select");
  const count = picture.querySelector("b"), details = picture.querySelector("output");
  const squares = [...picture.querySelectorAll("rect[data-pair]")];
  let selected = null;
  const reasonsOf = (square) => {
    const reasonSet = data.cells[`${scheme.value} ${ranks.value}`][squares.indexOf(square)];
    return data.reason_sets[reasonSet].map((index) => data.reasons[index]);
  };
  const describe = () => {
    if (!selected) return;
    const reasons = reasonsOf(selected);
    details.textContent = selected.dataset.pair + (reasons.length ? ": refused\n" : ": valid");
    details.textContent += reasons.map((text) => "- " + text).join("\n");
  };
  const show = () => {
    let valid = 0;
    for (const square of squares) {
      const reasons = reasonsOf(square);
      valid += reasons.length === 0;
      square.setAttribute("class", reasons.length ? "refused" : "valid");
      const text = reasons.length ? reasons.join("\n") : "valid";
      square.querySelector("title").textContent = square.dataset.pair + "\n" + text;
    }
    count.textContent = `${valid} of ${squares.length} pairs are valid`;
    describe();
  };
  const select = (square) => {
    if (selected) selected.removeAttribute("data-chosen");
    selected = square;
    selected.setAttribute("data-chosen", "");
    describe();
  };
  for (const square of squares) {
    square.addEventListener("click", () => select(square));
    square.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(square); }
    });
  }
  scheme.addEventListener("change", show);
  ranks.addEventListener("change", show);
  show();
}
