// The text on the page that stands out too little: [text, ratio, its colour, the colour behind it].
const canvas = document.createElement("canvas");
canvas.width = canvas.height = 1;
const pen = canvas.getContext("2d", { willReadFrequently: true });
const rgba = (colour) => {
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data];
};
const over = ([r, g, b, a], under) => [r, g, b].map((part, n) => (part * a + under[n] * (255 - a)) / 255);
const behind = (element) => {
  const layers = [];
  for (let one = element; one; one = one.parentElement) layers.push(rgba(getComputedStyle(one).backgroundColor));
  return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
};
const light = (colour) => {
  const [r, g, b] = colour.map((part) => ((part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let looked = 0;
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.data.trim();
  if (!text || !element.checkVisibility() || element.closest("noscript, title, .skip")) continue;
  const drawn = element.namespaceURI.endsWith("svg");
  const style = getComputedStyle(element);
  const under = behind(element);
  const ink = over(rgba(drawn ? style.fill : style.color), under);
  const [high, low] = [light(ink), light(under)].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  looked += 1;
  if (ratio < 4.5) found.push([text, ratio.toFixed(2), ink, under]);
}
return { looked, found };
