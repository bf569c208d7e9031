// What the live page keeps in its address.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const source = readFileSync(new URL("../../attnmech/draw/live_address.js", import.meta.url), "utf8");
const { editOf, withEdit, withHead, forOtherText } = new Function(`${source}; return { editOf, withEdit, withHead, forOtherText };`)();
const NONE = { heads: [], prompt: "", position: null };

test("an edit returns from the address", () => {
  const edit = { heads: [[2, 6, "zero"], [10, 11, "patch"]], prompt: "a & b=c ∀", position: 3 };
  const address = withEdit("#layer=2&head=6&tab=why", edit);
  assert.deepEqual(editOf(address), edit);
  assert.equal(new URLSearchParams(address).get("tab"), "why");
});

test("what an address cannot mean is left out", () => {
  assert.deepEqual(editOf("#layer=2"), NONE);
  assert.deepEqual(editOf("#edit=L2H6-drop.LxH1-zero.L1H1-constructor&at="), NONE);
  assert.deepEqual(editOf("#edit=L0H0-mean.nonsense").heads, [[0, 0, "mean"]]);
});

test("only patches keep a prompt and a token", () => {
  assert.equal(withEdit("prompt=x&at=3", { heads: [[1, 2, "first"]], prompt: "x", position: 3 }), "edit=L1H2-first");
  assert.equal(withEdit("layer=1&edit=L1H2-zero", NONE), "layer=1");
});

test("a second click leaves a head alone", () => {
  const once = withHead([], 1, 2, "zero");
  assert.deepEqual(once, [[1, 2, "zero"]]);
  assert.deepEqual(withHead(once, 1, 2, "mean"), [[1, 2, "mean"]]);
  assert.deepEqual(withHead(once, 1, 2, "zero"), []);
});

test("another text keeps the head and the edit, not the row", () => {
  assert.equal(forOtherText("#layer=2&head=6&query=4&edit=L2H6-zero&at=3"), "layer=2&head=6&edit=L2H6-zero");
});
