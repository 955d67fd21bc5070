"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const say = (words) => { find("spoken").textContent = words; };

  // light and dark

  const themes = ["system", "light", "dark"];
  const keep = (name) => { try { localStorage.setItem("pellucid-theme", name); } catch { /* not for files, in some browsers */ } };
  const kept = () => { try { return localStorage.getItem("pellucid-theme"); } catch { return null; } };
  const setTheme = (name) => {
    document.documentElement.dataset.theme = name;
    find("theme").textContent = `Theme: ${name}`;
  };
  setTheme(themes.includes(kept()) ? kept() : "system");
  find("theme").hidden = false;
  find("theme").addEventListener("click", () => {
    const name = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
    setTheme(name);
    keep(name);
  });

  // tables

  const special = { inf: Infinity, "-inf": -Infinity, nan: NaN };
  const valueOf = (cell) => (cell.dataset.value in special ? special[cell.dataset.value] : Number(cell.dataset.value));
  const byName = new Intl.Collator("en", { numeric: true }).compare;

  function sort(table, column, direction) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const key = (row) => (column ? valueOf(row.cells[column]) : row.cells[0].dataset.value);
    const compare = (a, b) => {
      if (direction === "none") return a.dataset.place - b.dataset.place;
      const [one, other] = [key(a), key(b)];
      // what is no number stands last, whichever way
      const lacking = Number.isNaN(one) - Number.isNaN(other);
      if (column && (lacking || Number.isNaN(one))) return lacking || a.dataset.place - b.dataset.place;
      const order = column ? (one === other ? 0 : one < other ? -1 : 1) : byName(one, other);
      return (direction === "ascending" ? order : -order) || a.dataset.place - b.dataset.place;
    };
    body.append(...rows.sort(compare));
  }

  for (const table of document.querySelectorAll("table")) {
    [...table.tBodies[0].rows].forEach((row, place) => { row.dataset.place = place; });
    const heads = [...table.querySelectorAll("th[scope=col]")];
    heads.forEach((head, column) => {
      // the best first, but names from A
      const turns = column ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
      head.querySelector("button").addEventListener("click", (event) => {
        const next = turns[(turns.indexOf(head.getAttribute("aria-sort")) + 1) % turns.length];
        heads.forEach((other) => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", next);
        sort(table, column, next);
        const by = event.currentTarget.dataset.spoken;
        say(next === "none" ? "In the order of the set" : `Sorted by ${by}, ${next}`);
      });
    });
  }

  // options

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const block = find(button.dataset.copies);
      let done = true;
      try {
        await navigator.clipboard.writeText(block.textContent);
      } catch {
        const selection = getSelection();
        selection.selectAllChildren(block);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Selected: press Ctrl+C";
      say(button.textContent);
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // pictures

  const pictures = JSON.parse(find("content").textContent);
  if (!pictures.length) return;
  find("viewer").hidden = false;
  const stage = find("stage");
  const sheets = { left: document.querySelector("#pane-left .sheet"), right: document.querySelector("#pane-right .sheet") };
  const state = { place: 0, left: "", right: "", zoom: 1, x: 0, y: 0, fitted: true };
  const least = 0.05, most = 32;

  const option = (value, label) => {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = label;
    return made;
  };

  // ground truth where there is one, or else what comes first
  const referenceOf = (picture) => picture.sources.find((source) => source.key === "gt") || picture.sources[0];

  function choicesOf(picture) {
    const reference = referenceOf(picture);
    const plain = picture.sources.map((source) => ({ ...source, layers: [source] }));
    const differences = picture.sources.filter((source) => source !== reference).map((source) => ({
      key: `difference-${source.key}`,
      label: `difference: ${source.label} − ${reference.label}`,
      scores: source.scores,
      layers: [reference, source],
    }));
    return [...plain, ...differences];
  }

  function firstPair(picture) {
    const keys = picture.sources.map((source) => source.key);
    const outputs = keys.filter((key) => key.startsWith("output"));
    const before = outputs.length > 1 ? outputs[0] : keys.includes(picture.before) ? picture.before : keys[0];
    const after = outputs.length > 1 ? outputs[1] : outputs[0] || keys[keys.length - 1];
    return [before, after];
  }

  function draw(side) {
    const picture = pictures[state.place];
    const choice = choicesOf(picture).find((entry) => entry.key === state[side]);
    const isDifference = choice.layers.length > 1;
    const factor = Number(find("factor").value);
    const images = choice.layers.map((source, layer) => {
      const image = new Image();
      image.alt = layer ? "" : `${picture.name}, ${choice.label}`;
      image.className = source.key === "input" ? "coarse" : "";
      image.draggable = false;
      image.addEventListener("error", () => {
        find("failed").textContent = `The file of ${picture.name}, ${source.label} could not be shown; is it still beside this page?`;
        find("failed").hidden = false;
      });
      image.src = source.src;
      return image;
    });
    sheets[side].replaceChildren(...images);
    sheets[side].style.filter = isDifference ? `brightness(${factor})` : "";
    const label = isDifference ? `${choice.label}, × ${factor}` : choice.label;
    find(`tag-${side}`).textContent = label;
    find("amplified").hidden = !(state.left + state.right).includes("difference");
    const subject = choice.layers[choice.layers.length - 1];
    find(`caption-${side}`).textContent = subject.scores ? `${subject.label}: ${subject.scores}` : "";
  }

  function place() {
    const picture = pictures[state.place];
    for (const sheet of Object.values(sheets)) {
      sheet.style.width = `${picture.w}px`;
      sheet.style.height = `${picture.h}px`;
      sheet.style.transform = `translate(${state.x}px, ${state.y}px) scale(${state.zoom})`;
    }
    stage.classList.toggle("enlarged", state.zoom * devicePixelRatio > 1.001);
    find("zoom").value = `${Math.round(state.zoom * 100)} %`;
  }

  function fit() {
    const picture = pictures[state.place];
    const highest = Math.min(innerHeight * 0.68, 680), lowest = Math.min(highest, stage.clientWidth * 0.42);
    const zoom = Math.min(stage.clientWidth / picture.w, highest / picture.h);
    // small pictures are enlarged by whole numbers, so that all their pixels are of one size
    state.zoom = Math.max(Math.min(zoom >= 1 ? Math.floor(zoom) : zoom, most), 1e-3);
    stage.style.height = `${Math.round(Math.max(picture.h * state.zoom, lowest))}px`;
    state.x = Math.round((stage.clientWidth - picture.w * state.zoom) / 2);
    state.y = Math.round((stage.clientHeight - picture.h * state.zoom) / 2);
    state.fitted = true;
    place();
  }

  const middle = () => [stage.clientWidth / 2, stage.clientHeight / 2];

  function zoomTo(zoom, [x, y] = middle()) {
    const next = Math.min(Math.max(zoom, least), most);
    state.x = Math.round(x - (x - state.x) * (next / state.zoom));
    state.y = Math.round(y - (y - state.y) * (next / state.zoom));
    state.zoom = next;
    state.fitted = false;
    hold();
    place();
  }

  // a part of the picture stays in sight
  function hold() {
    const picture = pictures[state.place], rest = 40;
    const clamp = (at, length, room) => Math.min(Math.max(at, rest - length * state.zoom), room - rest);
    state.x = clamp(state.x, picture.w, stage.clientWidth);
    state.y = clamp(state.y, picture.h, stage.clientHeight);
  }

  function move(dx, dy) {
    state.x += dx;
    state.y += dy;
    state.fitted = false;
    hold();
    place();
  }

  function split(share) {
    const value = Math.min(Math.max(share, 0), 1);
    find("split").value = Math.round(value * 1000);
    find("split").setAttribute("aria-valuetext", `${Math.round(value * 100)} % left picture`);
    find("pane-left").style.clipPath = `inset(0 ${(1 - value) * 100}% 0 0)`;
    find("divider").style.left = `${value * 100}%`;
  }

  function show(next) {
    state.place = (next + pictures.length) % pictures.length;
    const picture = pictures[state.place];
    const choices = choicesOf(picture);
    const pair = firstPair(picture);
    find("failed").hidden = true;
    ["left", "right"].forEach((side, number) => {
      find(side).replaceChildren(...choices.map((choice) => option(choice.key, choice.label)));
      // what was chosen stays, where this picture has it
      if (!choices.some((choice) => choice.key === state[side])) state[side] = pair[number];
      find(side).value = state[side];
      draw(side);
    });
    find("picture").value = state.place;
    stage.setAttribute("aria-label", `${picture.name}, ${picture.h} by ${picture.w} pixels`);
    document.querySelectorAll("tbody tr").forEach((row) => {
      const link = row.querySelector("[data-picture]");
      row.classList.toggle("shown", Boolean(link) && Number(link.dataset.picture) === state.place);
    });
    fit();
  }

  // pictures whose files are all missing stay in the list's order, but cannot be chosen
  const groups = new Map();
  pictures.forEach((picture, number) => {
    if (!groups.has(picture.set)) {
      const group = document.createElement("optgroup");
      group.label = picture.set;
      groups.set(picture.set, group);
      find("picture").append(group);
    }
    const made = option(number, picture.name);
    made.disabled = !picture.sources.length;
    groups.get(picture.set).append(made);
  });

  function step(direction) {
    let next = state.place;
    do next = (next + direction + pictures.length) % pictures.length; while (!pictures[next].sources.length);
    show(next);
    say(pictures[next].name);
  }

  find("picture").addEventListener("change", (event) => show(Number(event.target.value)));
  find("previous").addEventListener("click", () => step(-1));
  find("next").addEventListener("click", () => step(1));
  for (const side of ["left", "right"]) {
    find(side).addEventListener("change", (event) => { state[side] = event.target.value; draw(side); });
  }
  find("swap").addEventListener("click", () => {
    [state.left, state.right] = [state.right, state.left];
    for (const side of ["left", "right"]) { find(side).value = state[side]; draw(side); }
  });
  find("factor").addEventListener("change", () => { draw("left"); draw("right"); });
  find("split").addEventListener("input", (event) => split(event.target.value / 1000));
  find("larger").addEventListener("click", () => zoomTo(state.zoom * 1.5));
  find("smaller").addEventListener("click", () => zoomTo(state.zoom / 1.5));
  find("fit").addEventListener("click", fit);
  find("actual").addEventListener("click", () => zoomTo(1));

  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-picture]");
    if (!link) return;
    event.preventDefault();
    show(Number(link.dataset.picture));
    find("viewer").scrollIntoView();
    stage.focus({ preventScroll: true });
  });

  const keys = {
    "+": () => zoomTo(state.zoom * 1.5), "=": () => zoomTo(state.zoom * 1.5), "-": () => zoomTo(state.zoom / 1.5),
    0: fit, 1: () => zoomTo(1), "[": () => step(-1), "]": () => step(1),
    ArrowLeft: () => move(48, 0), ArrowRight: () => move(-48, 0), ArrowUp: () => move(0, 48), ArrowDown: () => move(0, -48),
  };
  stage.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });

  // the wheel scrolls the page until the picture is in focus, or with Ctrl
  stage.addEventListener("wheel", (event) => {
    if (document.activeElement !== stage && !event.ctrlKey) return;
    event.preventDefault();
    const box = stage.getBoundingClientRect();
    zoomTo(state.zoom * Math.exp(-event.deltaY / 400), [event.clientX - box.left, event.clientY - box.top]);
  }, { passive: false });

  const pointers = new Map();
  let dividing = false;
  stage.addEventListener("pointerdown", (event) => {
    dividing = Boolean(event.target.closest("#divider"));
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    stage.setPointerCapture(event.pointerId);
    stage.classList.add("moving");
  });
  stage.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const box = stage.getBoundingClientRect();
    const now = [event.clientX, event.clientY];
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    pointers.set(event.pointerId, now);
    if (dividing) {
      split((event.clientX - box.left) / box.width);
    } else if (other) {
      const far = ([ax, ay], [bx, by]) => Math.hypot(ax - bx, ay - by) || 1;
      const at = [(now[0] + other[0]) / 2 - box.left, (now[1] + other[1]) / 2 - box.top];
      zoomTo(state.zoom * (far(now, other) / far(before, other)), at);
    } else {
      move(now[0] - before[0], now[1] - before[1]);
    }
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    stage.addEventListener(kind, (event) => {
      pointers.delete(event.pointerId);
      if (!pointers.size) { dividing = false; stage.classList.remove("moving"); }
    });
  }

  // the window, not the stage, whose height is chosen here
  addEventListener("resize", () => { if (state.fitted) fit(); else { hold(); place(); } });
  split(0.5);
  show(pictures.findIndex((picture) => picture.sources.length));
})();
