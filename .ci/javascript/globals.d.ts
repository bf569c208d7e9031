// What the scripts of a page give each other, and the data that Python gives them. Only the checker reads this.

/** view.css; scripts.py puts it before the views. */
declare const STYLE: string;

declare const attnmech: Attnmech;

declare const Plotly: {
  react(place: Element | string, data: object[], layout: object, options: object): Promise<unknown>;
  toImage(place: Element, options: object): Promise<string>;
  newPlot(place: Element, data: object[], layout: object, options: object): Promise<PlotlyLaidOut>;
  Snapshot: { toSVG(place: Element, format: "svg", scale: number): string };
};

/** A figure's element once it is drawn, with the axes of its subplots. */
type PlotlyLaidOut = Element & { _fullLayout: { _plots: Record<string, { xaxis: PlotlyAxis; yaxis: PlotlyAxis }> } };
type PlotlyAxis = { _id: string; c2p(value: number): number };

declare const CircuitsVis: { render(id: string, component: unknown, props: object): void; [component: string]: unknown };

interface Window {
  attnmech: Attnmech;
  Plotly?: typeof Plotly;
  /** Draws a figure for a file (figure_files.js). */
  attnmechSvg(given: FigureForFile): Promise<{ svg: string; height: number }>;
  /** Prepares a view for a file (view_files.js). */
  attnmechFit(most: number | null): Promise<number>;
}

interface FigureForFile {
  figure: { data: object[]; layout: { height: number } };
  title: string;
  /** In pixels of the screen, as all lengths. */
  width: number;
  /** null for the figure's own, up to `most`. */
  height: number | null;
  most: number;
  size: number;
  family: string;
}

interface Attnmech {
  /** Bytes that Python compressed, out of base64. */
  unzip(base64: string): Promise<Uint8Array<ArrayBuffer>>;
  script(name: string, late?: () => void): Promise<void>;
  show(id: string, kind: string, scripts: string[]): Promise<void>;
  views: Views;
  shared: Shared;
}

/** What a page's module takes of attnmech's own script. */
interface Shared {
  unpack(packed: Packed): Promise<Unpacked>;
  unpackTexts(codes: string): Promise<string[]>;
  patternsOf(values: Pick<Unpacked, "of">, heads: number): Patterns;
  drawPlotly(place: PlotlyPlace, figure: PlotlyFigure, pause?: () => Promise<unknown>): Promise<unknown>;
  percent(share: number): string;
  signed(value: number, digits: number): string;
  MOST_ASPECT: number;
}

/** The functions that draw a view, by `View.kind`. */
interface Views {
  plotly(stage: Stage, figure: PlotlyFigure & { title?: string }): Promise<unknown>;
  head_picker(stage: Stage, data: HeadPickerData): Promise<unknown>;
  circuitsvis(stage: Stage, data: { element: string; props: object }): void;
  sentence(stage: Stage, data: SentenceData): Promise<SentenceControl>;
  token_graph(stage: Stage, data: GraphData): Promise<Control & { weights(): number[][]; edges(): Line[] }>;
  model(stage: Stage, data: ModelData): Promise<Control>;
  atlas(stage: Stage, data: AtlasData): void;
  examples(stage: Stage, data: ExamplesData): Promise<{ choose(chosen: { layer: number; head: number }): Promise<void> }>;
  heads(stage: Stage, data: HeadMapData): { choose(chosen: Partial<HeadMapChoice>): void };
  embedding(stage: Stage, data: EmbeddingData): Promise<object>;
}

/** attnmech/draw/heads.py; arrays are flat, layer by layer. */
interface HeadMapData {
  layers: number[];
  heads: number;
  types: string[][];
  /** By type, its letter and its colour. */
  letters: Record<string, [string, string]>;
  numbers: Record<string, { label: string; group: string; values: (number | null)[]; clear?: boolean[] }>;
  sentences: string[];
  /** Of each head, in how many example rows it attends to each token. */
  attended: Record<string, number>[];
}

/** Indices of layer and head; names of numbers, or "type" and "map". */
interface HeadMapChoice {
  layer: number;
  head: number;
  colour: string;
  across: string;
  up: string;
}

/** The element of a view. */
interface Stage extends HTMLElement {
  control?: Control;
}

/** What a page may ask of a view that follows its choices. */
interface Control {
  choose(choice: Partial<Choice>): void;
  print(printing: boolean): void;
}

interface HTMLElementEventMap {
  /** What a reader chose in a view. */
  "attnmech-choose": CustomEvent<Partial<Choice>>;
  /** The options of a sentence view that are not the usual ones. */
  "attnmech-options": CustomEvent<Partial<SentenceOptions>>;
}

/** Indices; without a query, all rows are shown; instead of one, the sentence view takes a key. */
interface Choice {
  layer: number;
  head: number;
  query: number | null;
  key?: number;
}

interface SentenceControl extends Control {
  weights(): number[][][];
  lines(): Line[];
  options(given: Partial<SentenceOptions>): void;
}

/** What a reader sets in the sentence view. */
interface SentenceOptions {
  mode: number;
  hideFirst: boolean;
  hideSpecial: boolean;
  least: number;
}

// ---- data (packing.py, patterns.py) -------------------------------------------------------------------------------

interface Packed {
  low: number[];
  step: number[];
  codes: string;
  scale?: "logarithm" | "root";
}

interface Unpacked {
  slice(start: number, count: number): Float32Array;
  of(block: number): Float32Array;
}

/** Probabilities by layer and head, [query key] flat. */
interface Patterns {
  of(layer: number, head: number): Float32Array;
}

/** The heads that a reader can choose, and the first choice as indices. */
interface HeadsData {
  layers: number[];
  heads: number;
  chosen: { layer: number; head: number };
}

/** The figure of the first choice, and by choice what differs from it (head_picker.py). */
interface HeadPickerData extends PlotlyFigure {
  choices: Record<string, number[]>;
  chosen: Record<string, number>;
  title: string;
  /** Of each head a list of paths with what stands there, as packed JSON. */
  changes: string;
}

/** What every view of several layers has; a report gives it probabilities that it has unpacked, and its own selectors. */
interface LayersData extends HeadsData {
  queries: string[];
  first?: number; // the position of the first query
  keys: string[];
  pattern: Packed | Patterns;
  words: Words;
  embedded?: boolean;
}

/** What weights are called (draw/patterns.py): "probability" of "attention". A report changes them. */
interface Words {
  weight: string;
  whole: string;
  mark: string;
}

/** What positions are called (basics/nouns.py). */
interface Nouns {
  first: string;
  token: string;
  tokens: string;
  key: string;
  queries: string;
  keys: string;
}

interface LinesData extends LayersData {
  nouns: Nouns;
  /** What no key has, by row. */
  rest?: Packed | Patterns;
  /** Rows in which the keys that are kept have no more than this are blank. */
  floor?: number;
}

interface SentenceData extends LinesData {
  /** Of each key. */
  special: boolean[];
  /** Heads that the data leave out, by layer · heads + head. */
  missing?: number[];
  options?: Partial<SentenceOptions>;
}

interface GraphData extends LinesData {
  threshold: number;
  /** Whether the keys stand on a line of their own. */
  across: boolean;
}

interface ModelData extends LayersData, Partial<Facts> {
  /** What the hover box says of each head besides its name. */
  remarks?: string[];
  /** Small maps alone, for which no facts are needed. */
  overview?: boolean;
}

/** methods/head_types/atlas.py */
interface AtlasData {
  columns: string[];
  rows: AtlasRow[];
  types: string[];
  /** The letter and the colour of each type. */
  letters: Record<string, [string, string]>;
}

/** methods/examples/figures.py */
interface ExamplesData extends HeadsData {
  /** What the rows are ordered by, in words. */
  meaning: string;
  /** The most rows of a head from which shares and fifths are computed. */
  sample: number;
  /** The rows of each layer, packed; or the files that hold them. */
  packed: string[];
  files: string[];
  /** Whether the page around the view chooses the head. */
  embedded: boolean;
}

interface AtlasRow {
  name: string;
  types: string[];
  nearest: string;
  cells: string[];
  /** What the columns are sorted by. */
  values: (number | null)[];
  example: { before: string[]; around: string[]; key_at: number; weight: string; distance: number } | null;
}

interface Facts {
  /** How many rows have a choice; of each head, the key that each row looks at most, and means over these rows. */
  rows: number;
  top: Packed;
  means: Record<"first" | "self" | "previous", number[]>;
}

// ---- data of joint embeddings (methods/joint_embedding/page.py) ------------------------------------------------

interface EmbeddingData {
  /** The names of the view's choices in the page's address. */
  inAddress: string[];
  layers: number[];
  /** Of each head, the index of its layer and its number. */
  places: [number, number][];
  /** How many; there are twice as many points, queries before keys. */
  tokens: number;
  /** What they come from: "text" or "image". */
  unit: string;
  labels: string;
  /** The characters of each token, in which a search looks. */
  characters: string;
  text: Packed;
  position: Packed;
  lengths: number[];
  special: number[];
  classes: string[];
  class: Packed;
  kinds: string[];
  projections: Record<string, Projection>;
  norms: Packed;
  highest: Packed;
  weights: Packed;
  about: AboutHead[];
  meanings: Record<string, string>;
  texts: Record<string, SentenceData>;
  notes: string[];
  anomalies: [number, number, string, number | null][];
  images: { pictures: Record<string, string>; grid: [number, number]; place: Packed; colours: Packed } | null;
}

interface Projection {
  label: string;
  dims: number;
  centre: number[][];
  /** About the centre; one scale for all axes of a head. */
  points: Packed;
  /** Of each head, the mean distance between its queries, and between its keys. */
  spread: [number, number][];
}

interface AboutHead {
  kind: number;
  scale: number | null;
  curve: [(number | null)[], (number | null)[]];
  numbers: Record<string, number | null>;
}

/** What is chosen on the page; its address says it. */
interface EmbeddingState {
  show: string;
  block: number;
  projection: string;
  pointColour: string;
  search: string;
  whole: boolean;
  sorted: boolean;
  size: number;
  flat: boolean;
  pictures: boolean;
  labels: boolean;
  lines: boolean;
  bySize: boolean;
  text: number;
  /** Queries before keys; -1 for none. */
  point: number;
}

/** The tokens behind the points; -1 stands for no place. */
interface EmbeddingTokens {
  count: number;
  labels: string[];
  characters: string[];
  text: Float32Array;
  position: Float32Array;
  lengths: number[];
  class: Float32Array;
  classes: string[];
  special: Set<number>;
  texts: number;
  images: { pictures: Record<string, string>; grid: [number, number]; place: Float32Array; colours: Float32Array } | null;
}

/** The points of one projection: `codes` [head point axis] from 0 to 65534, `step` of each head in its units. */
interface Cloud {
  label: string;
  dims: number;
  codes: Uint16Array;
  step: number[];
  spread: [number, number][];
}

/** What is drawn of the plots of all heads. */
interface EmbeddingFrame {
  /** The first plot in view, and how many. */
  first: number;
  count: number;
  /** Points of each. */
  shown: number;
  /** What colours show: 0 the token, 1 the norm, 2 the head. */
  mode: number;
  /** The point that stands out, -1 for none. */
  marked: number;
  /** Left, top, width and height of what is in view of the content, in CSS pixels. */
  view: [number, number, number, number];
  /** The side of a plot, the size of a dot, its opacity, device pixels for a CSS pixel. */
  dots: [number, number, number, number];
  ink: number[];
}

/** How points are coloured: by token, by the code of the norm (a ramp of 256), or by head. */
interface Colouring {
  by: "token" | "norm" | "head";
  /** [red green blue] of each point, step of the ramp, or head. */
  rgb: Uint8Array;
  legend: { words: string; entries: { colour: string; words: string; shape?: string }[]; ramps: { colours: string[]; words: string }[] };
}

// ---- data of a report (page.py, carried.py, chart.py) -------------------------------------------------------------

interface PageData {
  /** What Python calls visible; as text. A page about a corpus has none. */
  tokens: string[];
  /** The number of last tokens that the model wrote. */
  written: number;
  /** The tokens that these attend to, where they are another text's. */
  keys?: string[];
  /** Which of a model's stacks the page is about, where there are several. */
  part?: Record<string, number | string>;
  /** Escaped for plotly. */
  labels: string[];
  special: boolean[];
  /** The sign of each kind of key: "self", "first", "other". */
  marks: Record<string, string>;
  /** By name, the values that can be chosen. */
  choices: Record<string, any[]>;
  inCalls: Record<string, string[]>;
  optional: string[];
  start: Record<string, number>;
  /** By label, the names of the scripts. */
  scripts: Record<string, string>;
  /** The heads whose scores and terms the page holds cell by cell, where these are not all. */
  detailed: number[] | null;
  /** The names of the arrays of probabilities, and of what no key has. */
  pattern: string | null;
  rest: string | null;
  /** The name of the array of ‖f(x_j)‖, [layer head key]. */
  norms: string | null;
  /** Of probabilities, and of what attention carries. */
  words: Words[];
  nouns: Nouns;
  figures: Record<string, PageFigure>;
  /** By the id of a place, the kind of view of the chosen head. */
  views: Record<string, "sentence" | "token_graph" | "model">;
  /** By the id of a place with small maps, what the hover box says of each head. */
  remarks: Record<string, string[]>;
  others: Record<string, { kind: string; data: { inAddress?: string[]; layers?: number[] }; scripts: string[] }>;
  heads: Omit<HeadMapData, "layers" | "heads">;
  texts: Record<string, Column>;
  arrays: Record<string, Packed | { plain: (number | null)[] } | { texts: string }>;
  tables: Record<string, (string | boolean)[]>;
}

interface PageFigure {
  figure: PlotlyFigure;
  slots: Slot[];
  /** Whether the page holds it only for the heads in detail. */
  inDetail: boolean;
  /** The choices on which it depends. */
  follows: string[];
  /** By the name of a choice, the path to a clicked point's property that says it. */
  clicks: Record<string, string[]>;
}

/** A property of a figure that depends on what is chosen. */
interface Slot {
  path: string[];
  columns: Column[];
  less: Column | null;
  where: Column | null;
  equals: number | null;
  /** What the last axis of the columns is multiplied by before rows are divided by their sums. */
  weights: Column | null;
}

/** Where a choice finds its values in an array. */
interface Column {
  array: string;
  over: string[];
  shape: number[];
  table?: string;
  digits?: number;
  fixed?: Record<string, number>;
}

// ---- between the views --------------------------------------------------------------------------------------------

/** A token as a query or as a key. */
interface Place {
  side: string;
  index: number;
}

/** A weight between two tokens; the head is null for a mean over heads. */
interface Line {
  query: number;
  key: number;
  weight: number;
  head?: number | null;
}

interface PlotlyFigure {
  data: any[];
  layout: any;
}

/** An element in which plotly draws; `picture` says what a saved picture is called, `pause` is taken between steps. */
interface PlotlyPlace extends HTMLElement {
  picture(): { name: string; title: string };
  pause?: () => Promise<unknown>;
}

/** Once plotly has drawn. */
interface PlotlyDrawn extends PlotlyPlace {
  data: object[];
  _promises: Promise<unknown>[];
  on(event: "plotly_click", listener: (clicked: { points: any[] }) => void): void;
  _fullLayout: { width: number; height: number; font: { color: string } };
}

/** Heads, what happens to them, and for patches another prompt and the only token. */
interface LiveEdit {
  heads: [number, number, string][];
  prompt: string;
  position: number | null;
}

/** What the model writes with and without an edit (attnmech/live/edits.py). */
interface LiveBlock {
  sentences: string[];
  next: [string, number, number][];
  tokens: string[];
  losses: [(number | null)[], (number | null)[]];
  answers: string[][];
  parting: number;
  python: string;
}

/** What makes a page answer (attnmech/draw/page.py). */
interface LiveData {
  text: string;
  through: "server" | "notebook" | "";
  edit: LiveBlock | Record<string, never>;
}
