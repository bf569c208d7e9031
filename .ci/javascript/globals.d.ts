// What the scripts of a page give each other, and the data that Python gives them. Only the checker reads this.

/** view.css; scripts.py puts it before the views. */
declare const STYLE: string;

declare const attnmech: Attnmech;

declare const Plotly: {
  react(place: Element | string, data: object[], layout: object, options: object): Promise<unknown>;
  toImage(place: Element, options: object): Promise<string>;
};

declare const CircuitsVis: { render(id: string, component: unknown, props: object): void; [component: string]: unknown };

interface Window {
  attnmech: Attnmech;
  Plotly?: typeof Plotly;
}

interface Attnmech {
  /** Bytes that Python compressed, out of base64. */
  unzip(base64: string): Promise<Uint8Array<ArrayBuffer>>;
  script(name: string, late?: () => void): Promise<void>;
  show(id: string, kind: string, scripts: string[]): Promise<void>;
  views: Views;
  shared: Shared;
}

/** What page.js takes of shared.js. */
interface Shared {
  unpack(packed: Packed): Promise<Unpacked>;
  unpackTexts(codes: string): Promise<string[]>;
  patternsOf(values: Pick<Unpacked, "of">, heads: number): Patterns;
  drawPlotly(place: PlotlyPlace, figure: PlotlyFigure): Promise<unknown>;
  percent(share: number): string;
  signed(value: number, digits: number): string;
  MOST_ASPECT: number;
}

/** The functions that draw a view, by `View.kind`. */
interface Views {
  plotly(stage: Stage, figure: PlotlyFigure & { title?: string }): Promise<unknown>;
  circuitsvis(stage: Stage, data: { element: string; props: object }): void;
  sentence(stage: Stage, data: SentenceData): Promise<Control & { weights(): number[][][]; lines(): Line[] }>;
  token_graph(stage: Stage, data: GraphData): Promise<Control & { weights(): number[][]; edges(): Line[] }>;
  model(stage: Stage, data: ModelData): Promise<Control>;
  atlas(stage: Stage, data: AtlasData): void;
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
}

/** Indices; without a query, all rows are shown. */
interface Choice {
  layer: number;
  head: number;
  query: number | null;
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

/** What every view of several layers has; a report gives it probabilities that it has unpacked, and its own selectors. */
interface LayersData {
  layers: number[];
  heads: number;
  queries: string[];
  keys: string[];
  chosen: { layer: number; head: number };
  pattern: Packed | Patterns;
  embedded?: boolean;
}

interface LinesData extends LayersData {
  /** What no key has, by row. */
  rest?: Packed | Patterns;
}

interface SentenceData extends LinesData {
  /** Of each key. */
  special: boolean[];
}

interface GraphData extends LinesData {
  threshold: number;
  /** Whether the keys stand on a line of their own. */
  across: boolean;
}

interface ModelData extends LayersData, Partial<Facts> {
  /** What the hover box says of each head besides its name. */
  told?: string[];
  /** Small maps alone, for which no facts are needed. */
  overview?: boolean;
}

/** attnmech/draw/atlas.py */
interface AtlasData {
  columns: string[];
  rows: AtlasRow[];
  types: string[];
  /** The letter and the colour of each type. */
  letters: Record<string, [string, string]>;
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

// ---- data of a report (page.py, carried.py, chart.py) -------------------------------------------------------------

interface PageData {
  /** What Python calls visible; as text. */
  tokens: string[];
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
  /** The names of the arrays of probabilities, and of what no key has. */
  pattern: string;
  rest: string | null;
  figures: Record<string, PageFigure>;
  /** By the id of a place, the kind of view of the chosen head. */
  views: Record<string, "sentence" | "token_graph" | "model">;
  /** By the id of a place with small maps, what the hover box says of each head. */
  told: Record<string, string[]>;
  others: Record<string, { kind: string; data: object; scripts: string[] }>;
  texts: Record<string, Column>;
  arrays: Record<string, Packed | { plain: (number | null)[] } | { texts: string }>;
  tables: Record<string, (string | boolean)[]>;
}

interface PageFigure {
  figure: PlotlyFigure;
  slots: Slot[];
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

/** An element in which plotly draws; `picture` says what a saved picture is called. */
interface PlotlyPlace extends HTMLElement {
  picture(): { name: string; title: string };
}

/** Once plotly has drawn. */
interface PlotlyDrawn extends PlotlyPlace {
  data: object[];
  on(event: "plotly_click", listener: (clicked: { points: any[] }) => void): void;
  _fullLayout: { width: number; height: number; font: { color: string } };
}
