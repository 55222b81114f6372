"use strict";
// The block explorer: one state, one function that draws it. Text enters the page as text nodes only.
(() => {
  const prompts = JSON.parse(document.getElementById("traces").textContent);
  if (!prompts.length) return;

  const get = (name) => document.getElementById(`x-${name}`);
  const state = { prompt: 0, rule: null, round: 0, hidden: new Set() };
  const RULES = ["block", "token"];

  function make(tag, options = {}, ...children) {
    const { data = {}, aria = {}, style = {}, ...properties } = options;
    const element = Object.assign(document.createElement(tag), properties);
    Object.assign(element.dataset, data);
    for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
    for (const [name, value] of Object.entries(style)) element.style.setProperty(name, value);
    element.append(...children);
    return element;
  }

  const number = (value) => (value > 0 && value < 0.005 ? "<0.01" : value > 0.995 && value < 1 ? ">0.99" : value.toFixed(2));
  const percent = (value) => `${(100 * Math.min(1, value)).toFixed(1)}%`;
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const traces = () => prompts[state.prompt].traces.filter((trace) => trace.rule === state.rule);
  const name = (trace) => {
    const twins = traces().filter((other) => other.drafter === trace.drafter);
    return twins.length > 1 ? `${trace.drafter}, draft T ${trace.temperature}` : trace.drafter;
  };
  const rounds = () => Math.max(1, ...traces().map((trace) => trace.rounds.length));

  // Blanks would be invisible in a card.
  function visible(text) {
    const shown = make("code", { className: "token", title: JSON.stringify(text) });
    const marks = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };
    if (!text) shown.append(make("span", { className: "blank", textContent: "∅" }));
    for (const part of text.match(/[ \n\t\r]|[^ \n\t\r]+/g) || []) {
      shown.append(part in marks ? make("span", { className: "blank", textContent: marks[part] }) : part);
    }
    return shown;
  }

  const row = (className, ...texts) => make("div", { className }, ...texts.map((textContent) => make("span", { textContent })));

  function track(className, filled, coin) {
    const line = make("div", { className: `track ${className}` }, make("span", { className: "fill", style: { width: percent(filled) } }));
    if (coin !== undefined) line.append(make("span", { className: "tick", style: { left: percent(coin) } }));
    return line;
  }

  function card(trace, round, index) {
    const [text, p, q, alpha, threshold, coin, success] = round.tokens[index];
    const kept = index < round.kept;
    const parts = [
      make("div", { className: "head" },
        make("span", { className: "place", textContent: index + 1 }),
        make("span", { className: "verdict", textContent: kept ? "✓ kept" : "✗ dropped" })),
      visible(text),
      row("pair", `p ${number(p)}`, `q ${number(q)}`),
    ];
    const decided = `alpha ${number(alpha)}, coin ${number(coin)}, threshold ${number(threshold)}, ${success ? "success" : "failure"}`;
    parts.push(
      row("pair", `α ${number(alpha)}`, `h ${number(threshold)}`),
      track("alpha", alpha),
      row("pair coin", `coin ${number(coin)}`, success ? "✓ < h" : "✗ ≥ h"),
      track("throw", threshold, coin));
    if (trace.rule === "block") parts.push(row("pair other", "token rule", index < round.tokenKept ? "✓" : "✗"));
    return make("li", {
      className: `card-token ${kept ? "kept" : "dropped"}`,
      data: { text, kept: Number(kept), success },
      aria: { label: `${index + 1}: ${JSON.stringify(text)}, ${kept ? "kept" : "dropped"}; p ${number(p)}, q ${number(q)}; ${decided}${trace.rule === "block" ? `; token rule ${index < round.tokenKept ? "keeps" : "drops"} it` : ""}` },
    }, ...parts);
  }

  function added(round) {
    const bonus = round.kept === round.tokens.length;
    const kind = round.next === null ? "end" : bonus ? "bonus" : "correction";
    const verdict = { end: "■ end of text", bonus: "★ bonus", correction: "↺ correction" }[kind];
    const why = { end: "no token is added", bonus: "whole block kept: one more from the target", correction: "drawn by the target instead" }[kind];
    return make("li", { className: `card-token added ${kind}`, data: { text: round.next ?? "", kind }, aria: { label: `${verdict.slice(2)}: ${round.next === null ? "" : JSON.stringify(round.next)}` } },
      make("div", { className: "head" }, make("span", { className: "verdict", textContent: verdict })),
      ...(round.next === null ? [] : [visible(round.next)]),
      make("div", { className: "why", textContent: why }));
  }

  const gained = (round) => round.kept + (round.next === null ? 0 : 1);

  function panel(trace) {
    const last = trace.rounds.length - 1;
    const box = make("section", { className: "panel", data: { drafter: name(trace) }, aria: { label: name(trace) }, style: { "--ink": `var(--ink-${trace.ink})` } },
      make("h3", { textContent: name(trace) }));
    if (last < 0) {
      box.append(make("p", { className: "sum", textContent: "The first token ended the text: nothing was drafted." }));
      return box;
    }
    const at = Math.min(state.round, last);
    const round = trace.rounds[at];
    const tokens = trace.rounds.slice(0, at + 1).reduce((sum, each) => sum + gained(each), 0);
    const finished = state.round > last ? `Finished after ${plural(last + 1, "round")}; its last one: ` : "";
    const end = round.next === null ? "the text ended" : round.kept === round.tokens.length ? "a bonus token" : "a correction";
    const sum = make("p", { className: "sum" }, finished,
      make("strong", { className: "count", textContent: `${round.kept} of ${round.tokens.length}` }), ` kept, then ${end}.`);
    if (trace.rule === "block") {
      sum.append(" Token verification, same coins: ", make("strong", { className: "token-count", textContent: round.tokenKept }), ".");
    }
    const rate = make("p", { className: "rate", textContent: `${plural(tokens, "token")} in ${plural(at + 1, "call")}: ${(tokens / (at + 1)).toFixed(2)} per call so far` });
    const cards = make("ol", { className: "cards-token" }, ...round.tokens.map((_, index) => card(trace, round, index)), added(round));
    const before = trace.first + trace.rounds.slice(0, at).map((each) => each.tokens.slice(0, each.kept).map((t) => t[0]).join("") + (each.next ?? "")).join("");
    const text = make("p", { className: "so-far", aria: { label: "Text so far" } }, make("span", { className: "before", textContent: before }),
      make("ins", { className: "kept", textContent: round.tokens.slice(0, round.kept).map((t) => t[0]).join("") }),
      make("ins", { className: "added", textContent: round.next ?? "" }));
    box.append(sum, rate, cards, text);
    return box;
  }

  function draw() {
    const total = rounds();
    state.round = Math.max(0, Math.min(state.round, total - 1));
    get("panels").replaceChildren(...traces().filter((trace) => !state.hidden.has(trace.drafter)).map(panel));
    get("slider").max = total;
    get("slider").value = state.round + 1;
    get("round").textContent = `Round ${state.round + 1} of ${total}`;
    get("first").disabled = get("back").disabled = state.round === 0;
    get("next").disabled = get("last").disabled = state.round === total - 1;
  }

  function go(round) {
    state.round = round;
    draw();
  }

  function choose(prompt) {
    state.prompt = prompt;
    state.round = 0;
    const present = RULES.filter((rule) => prompts[prompt].traces.some((trace) => trace.rule === rule));
    if (!present.includes(state.rule)) state.rule = present[0];
    get("text").textContent = prompts[prompt].prompt;
    get("rules").replaceChildren(...present.map((rule) => {
      const input = make("input", { type: "radio", name: "x-rule", value: rule, checked: rule === state.rule });
      input.addEventListener("change", () => {
        state.rule = rule;
        state.round = 0;
        toggles();
        draw();
      });
      return make("label", {}, input, make("span", { textContent: rule }));
    }));
    toggles();
    draw();
  }

  function toggles() {
    const names = [...new Set(traces().map((trace) => trace.drafter))];
    get("drafters").hidden = names.length < 2;
    get("drafters").replaceChildren(get("drafters").firstElementChild, ...names.map((drafter) => {
      const input = make("input", { type: "checkbox", checked: !state.hidden.has(drafter) });
      input.addEventListener("change", () => {
        state.hidden[input.checked ? "delete" : "add"](drafter);
        draw();
      });
      return make("label", {}, input, ` ${drafter}`);
    }));
  }

  const groups = new Map();
  prompts.forEach((prompt, index) => {
    const title = `${prompt.target} · ${prompt.task}`;
    if (!groups.has(title)) groups.set(title, make("optgroup", { label: title }));
    const start = prompt.prompt.replace(/\s+/g, " ").trim();
    const place = groups.get(title).children.length + 1;
    const label = `${place}. ${start.length > 70 ? `${start.slice(0, 70)}…` : start}`;
    groups.get(title).append(make("option", { value: index, textContent: label, title: prompt.id }));
  });
  get("prompt").append(...groups.values());
  get("prompt").value = 0;
  get("prompt").addEventListener("change", (event) => choose(Number(event.target.value)));
  get("slider").addEventListener("input", (event) => go(Number(event.target.value) - 1));
  get("first").addEventListener("click", () => go(0));
  get("back").addEventListener("click", () => go(state.round - 1));
  get("next").addEventListener("click", () => go(state.round + 1));
  get("last").addEventListener("click", () => go(rounds() - 1));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest("input, select, textarea, .scroll")) return;
    if (event.key === "ArrowLeft") go(state.round - 1);
    if (event.key === "ArrowRight") go(state.round + 1);
  });
  get("controls").hidden = get("text").hidden = false;
  choose(0);
})();
