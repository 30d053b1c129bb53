for (const picture of document.querySelectorAll(".matrix")) {
  const data = JSON.parse(picture.querySelector("script").textContent);
  const [scheme, ranks] = picture.querySelectorAll("select");
  const count = picture.querySelector("b"), details = picture.querySelector("output");
  const squares = [...picture.querySelectorAll("rect[data-pair]")];
  let chosen = null;
  const reasons = (square) => {
    const refusal = data.cells[`${scheme.value} ${ranks.value}`][squares.indexOf(square)];
    return data.refusals[refusal].map((index) => data.texts[index]);
  };
  const describe = () => {
    if (!chosen) return;
    const found = reasons(chosen);
    details.textContent = chosen.dataset.pair + (found.length ? ": refused\n" : ": valid");
    details.textContent += found.map((text) => "- " + text).join("\n");
  };
  const show = () => {
    let valid = 0;
    for (const square of squares) {
      const found = reasons(square);
      valid += found.length === 0;
      square.setAttribute("class", found.length ? "refused" : "valid");
      const text = found.length ? found.join("\n") : "valid";
      square.querySelector("title").textContent = square.dataset.pair + "\n" + text;
    }
    count.textContent = `${valid} of ${squares.length} pairs are valid`;
    describe();
  };
  const choose = (square) => {
    if (chosen) chosen.removeAttribute("data-chosen");
    chosen = square;
    chosen.setAttribute("data-chosen", "");
    describe();
  };
  for (const square of squares) {
    square.addEventListener("click", () => choose(square));
    square.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(square); }
    });
  }
  scheme.addEventListener("change", show);
  ranks.addEventListener("change", show);
  show();
}
