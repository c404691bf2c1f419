// Draw the first picture of each page when the site is built, so that it is there at once, and without JavaScript.
// Called with the pages' files. Draws with the very functions that draw in the browser.
import { readFileSync, writeFileSync } from "node:fs";
import { span } from "./assets/drawing.mjs";
import { collective, groupsHtml, layoutHtml, layoutTitle, named, nodesHtml, planHtml, raceHtml, recordedPicture, timelineHtml } from "./assets/pictures.mjs";

const WIDTH = 720; // of a lesson's text

// What is drawn into which elements, by the id of the JSON that a page holds.
const DRAWN = {
  recorded(recording) {
    const places = Object.fromEntries(recording.fields.map(({ name, at }) => [name, at]));
    const { picture, text } = recordedPicture(recording, places, WIDTH);
    return { first: picture, status: text };
  },
  "first-picture": ({ answer }) => ({ first: timelineHtml(answer, 980, span(answer)).html }),
  "first-mesh": (answer) => ({ ranks: nodesHtml(answer), rank: `<h3>${named(answer)}</h3>${groupsHtml(answer)}` }),
  "first-plan": (answer) => ({ best: planHtml(answer), layout: `<h3>${layoutTitle(answer.best[0])}</h3>${layoutHtml({ ...answer.best[0], card: answer.card })}` }),
  "first-curves": (answer) => ({ curves: raceHtml(answer) }),
  recordings(all) {
    const { picture, text } = collective(all["all-reduce, ring"]["4"], { step: 1 }, WIDTH);
    return { picture, status: text };
  },
};

const filled = (page, id, html) => {
  const element = new RegExp(`(<(div|p)[^>]* ?id="?${id}"?[^>]*>)(</\\2>)`);
  if (!element.test(page)) throw new Error(`no empty element #${id} to draw into`);
  // The picture keeps its height when it is drawn again, for a narrower window: nothing below it jumps.
  const tall = id === "first" && html.match(/<svg[^>]* height="(\d+)"/)?.[1];
  return page.replace(element, (_, open, tag, close) => (tall ? open.replace(">", ` style="min-height:${tall}px">`) : open) + html + close);
};

for (const file of process.argv.slice(2)) {
  let page = readFileSync(file, "utf8");
  for (const [id, draw] of Object.entries(DRAWN)) {
    const data = page.match(new RegExp(`<script type="application/json" id="${id}">([^]*?)</script>`));
    if (!data) continue;
    for (const [target, html] of Object.entries(draw(JSON.parse(data[1])))) page = filled(page, target, html);
  }
  writeFileSync(file, page);
}
