// What moves: a line along timelines, and the chunks of a collective. Nothing does where the reader wants none of it.

const still = matchMedia("(prefers-reduced-motion: reduce)");
const LONG_MS = 6000;

// Let a line run over timelines, {box, answer, scale, end} each; what begins later is pale until then.
export function playTimelines(pictures) {
  const begin = performance.now();
  const moved = pictures.map((picture) => ({ ...picture, line: picture.box.querySelector(".head"), bars: [...picture.box.querySelectorAll(".action")] }));
  function frame(now) {
    const part = still.matches ? 1 : Math.min((now - begin) / LONG_MS, 1);
    for (const { answer, scale, end, line, bars } of moved) {
      const time = part * end;
      line.setAttribute("transform", `translate(${time * scale} 0)`);
      line.setAttribute("visibility", part < 1 ? "visible" : "hidden");
      for (const bar of bars) {
        const [rank, i] = bar.dataset.at.split(",");
        bar.classList.toggle("later", part < 1 && answer.ranks[rank][i][3] > time);
      }
    }
    if (part < 1) requestAnimationFrame(frame);
  }
  requestAnimationFrame(frame);
}

// A collective's step: chunks move from rank to rank, and then lie where they have come.

// `form` has the slider `step`; `before` draws the step's messages, not yet moved, into `box`; `after` draws what they leave.
export function stepper(form, box, before, after) {
  const slider = form.elements.step;
  let playing = null;
  let shown = Number(slider.value);

  async function step() {
    const at = Number(slider.value);
    const forward = at === shown + 1;
    shown = at;
    if (!forward || still.matches) return after();
    before();
    const moves = [...box.querySelectorAll(".moving")].map((group) =>
      group.animate({ transform: ["none", `translateY(${group.dataset.by}px)`] }, { duration: 700, easing: "ease-in-out", fill: "forwards" }).finished);
    await Promise.allSettled(moves);
    if (Number(slider.value) === at) after();
  }

  function play() {
    clearInterval(playing);
    if (Number(slider.value) >= Number(slider.max)) shown = slider.value = 0;
    const next = () => {
      slider.value = Number(slider.value) + 1;
      step();
      if (Number(slider.value) >= Number(slider.max)) clearInterval(playing);
    };
    next();
    playing = setInterval(next, 1100);
  }

  return { step, play };
}
