// Finds the words in which two rendered texts differ, and marks them without changing any element.
//
// The marks are CSS highlights, so they work on rendered Markdown. Words come from Intl.Segmenter,
// which also splits texts without spaces.
import { diffArrays } from "./vendor/diff/array.js";

const segmenter = new Intl.Segmenter(undefined, { granularity: "word" });
const MAX_EDITS = 4000; // texts that differ in more words are different as a whole
const ALIKE = 0.25; // below this share of common words, marks are noise
const marks = globalThis.Highlight && { first: new Highlight(), second: new Highlight() };
for (const side in marks) CSS.highlights.set(side, marks[side]);

/** The words of an element in order, each with its place. */
function wordsOf(element) {
  const isText = (node) => (node.parentElement.closest("button, .hidden") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT, isText);
  const words = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const { segment, index } of segmenter.segment(node.data)) {
      if (segment.trim()) words.push({ text: segment, node, start: index, end: index + segment.length });
    }
  }
  return words;
}

/** Runs of equal and of different words, as `{ isSame, first: [from, to], second: [from, to] }`. */
function runsOf(first, second) {
  const changes = diffArrays(first, second, { maxEditLength: MAX_EDITS });
  if (!changes) return [{ isSame: false, first: [0, first.length], second: [0, second.length] }];
  const runs = [];
  let [left, right] = [0, 0];
  for (const { added, removed, count } of changes) {
    const [from, to] = [[left, right], [added ? left : left + count, removed ? right : right + count]];
    const isSame = !added && !removed;
    const last = runs.at(-1);
    if (last && last.isSame === isSame) [last.first[1], last.second[1]] = to;
    else runs.push({ isSame, first: [from[0], to[0]], second: [from[1], to[1]] });
    [left, right] = to;
  }
  return joined(runs);
}

const sizeOf = ({ first, second }) => Math.max(first[1] - first[0], second[1] - second[0]);

/** Join differences that only a few chance words separate, such as "the" in another sentence. */
function joined(runs) {
  const kept = [];
  runs.forEach((run, index) => {
    const [before, after] = [kept.at(-1), runs[index + 1]];
    const isChance = run.isSame && before && after && 2 * sizeOf(run) <= Math.min(sizeOf(before), sizeOf(after));
    if (before && (isChance || (!run.isSame && !before.isSame))) [before.first[1], before.second[1], before.isSame] = [run.first[1], run.second[1], false];
    else kept.push({ ...run });
  });
  return kept;
}

/** Compare two elements: the share of common words, and the ranges that differ on each side. */
export function difference(first, second) {
  const sides = { first: wordsOf(first), second: wordsOf(second) };
  const texts = Object.values(sides).map((words) => words.map((word) => word.text));
  const runs = runsOf(...texts);
  const total = texts[0].length + texts[1].length;
  const same = runs.filter((run) => run.isSame).reduce((sum, run) => sum + 2 * sizeOf(run), 0);
  const alike = total ? same / total : 1;
  const found = { alike, isSame: alike === 1, isOther: alike < ALIKE, first: [], second: [] };
  if (found.isOther) return found;
  for (const run of runs.filter((run) => !run.isSame)) {
    for (const side in sides) {
      const [from, to] = run[side];
      if (from < to) found[side].push(rangeOf(sides[side][from], sides[side][to - 1]));
    }
  }
  return found;
}

function rangeOf(from, to) {
  const range = new Range();
  range.setStart(from.node, from.start);
  range.setEnd(to.node, to.end);
  return range;
}

/** Mark a difference; returns the function that removes the marks. */
export function mark(found) {
  for (const side in marks) found[side].forEach((range) => marks[side].add(range));
  return () => {
    for (const side in marks) found[side].forEach((range) => marks[side].delete(range));
  };
}
