// A click on a heading sorts its table by that column; the next one turns the order round.
for (const head of document.querySelectorAll("th")) {
  head.style.cursor = "pointer"
  head.addEventListener("click", () => {
    const place = head.cellIndex, body = head.closest("table").tBodies[0]
    const falling = head.dataset.order !== "falling"
    head.dataset.order = falling ? "falling" : "rising"
    const value = row => row.cells[place].textContent.trim()
    const number = text => Number.isNaN(parseFloat(text)) ? -Infinity : parseFloat(text)
    const order = (a, b) => number(value(b)) - number(value(a)) || value(a).localeCompare(value(b))
    body.append(...[...body.rows].sort(falling ? order : (a, b) => order(b, a)))
  })
}
