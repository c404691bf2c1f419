// A step of a collective: its chunks move from rank to rank, and then lie where they have come.

const still = matchMedia("(prefers-reduced-motion: reduce)");

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
