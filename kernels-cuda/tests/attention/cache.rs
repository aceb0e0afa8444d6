//! A cache of several sequences in the interpreter's memory, and launches on it.

use quant_kernels_cpu::attention::KvType;
use quant_kernels_cuda::attention::{
    AppendArguments, AppendShape, DecodeArguments, DecodePlan, DecodeShape, Float, KvPageLayout, SplitRule,
};

use quant_kernels_cuda::compile::Source;

use super::machine::{Counters, Machine, Order};
use super::reference::{Held, Random};

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub kind: KvType,
    pub head_dim: usize,
    pub page_tokens: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub queries: usize,
    pub query: Float,
    pub rule: SplitRule,
    /// Whether the append kernel fills the pages. Other bytes are then unwritten, otherwise NaN.
    pub appended: bool,
}

impl Case {
    pub fn new(kind: KvType, head_dim: usize, group: usize) -> Self {
        let rule = SplitRule::default();
        Self {
            kind,
            head_dim,
            page_tokens: 64,
            kv_heads: 1,
            group,
            queries: 1,
            query: Float::F16,
            rule,
            appended: false,
        }
    }

    pub fn layout(&self) -> KvPageLayout {
        KvPageLayout::new(self.kind, self.head_dim, self.page_tokens).unwrap()
    }

    pub fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    pub fn rows(&self) -> usize {
        self.queries * self.heads()
    }

    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    pub fn plan(&self, sequences: usize, max_tokens: usize) -> DecodePlan {
        DecodeShape {
            layout: self.layout(),
            query_heads: self.heads(),
            kv_heads: self.kv_heads,
            sequences,
            queries: self.queries,
            max_tokens,
            query: self.query,
            out: Float::F32,
        }
        .plan_with(self.rule)
        .unwrap()
    }
}

/// Keys and values `[tokens, kv_heads, head_dim]`, queries `[queries, heads, head_dim]`.
#[derive(Clone)]
pub struct Sequence {
    pub tokens: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub query: Vec<f32>,
}

impl Sequence {
    pub fn random(case: &Case, tokens: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let row = case.kv_heads * case.head_dim;
        let [keys, values] = [1.5, -0.5].map(|mean: f32| {
            random.normals(tokens * row).into_iter().map(|x| 2.0 * x + mean).collect::<Vec<f32>>()
        });
        let query = random.normals(case.rows() * case.head_dim);
        Self { tokens, keys, values, query }
    }

    pub fn held(&self, case: &Case, head: usize) -> Held {
        let mut held = Held::new(case.kind, case.head_dim);
        for t in 0..self.tokens {
            let at = (t * case.kv_heads + head) * case.head_dim;
            held.push(&self.keys[at..][..case.head_dim], &self.values[at..][..case.head_dim]);
        }
        held
    }

    pub fn query_of(&self, case: &Case, row: usize) -> Vec<f64> {
        let row = &self.query[row * case.head_dim..][..case.head_dim];
        row.iter().map(|&x| f64::from(rounded(x, case.query))).collect()
    }
}

/// The results of a launch: `[sequences, queries, heads, head_dim]` and `[sequences, queries, heads]`.
pub struct Result {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub counters: Counters,
    /// Read, and occupied by the sequences.
    pub page_bytes_read: u64,
    pub page_bytes_held: u64,
}

/// Pages are in arbitrary order, and their unused slots contain NaN.
pub fn decode(case: &Case, sequences: &[Sequence], first: Option<&[u32]>, order: Order) -> Result {
    try_decode(case, sequences, first, order, None).unwrap_or_else(|fault| panic!("{case:?}: {fault}"))
}

/// [`decode`] that returns faults as errors, with a part of the kernel's source replaced if `planted` is set.
pub fn try_decode(
    case: &Case,
    sequences: &[Sequence],
    first: Option<&[u32]>,
    order: Order,
    planted: Option<[&str; 2]>,
) -> std::result::Result<Result, String> {
    let layout = case.layout();
    let mut machine = Machine::new();
    let counts: Vec<usize> = sequences.iter().map(|s| s.tokens.div_ceil(case.page_tokens)).collect();
    let (page_count, width) =
        (counts.iter().sum::<usize>() + 1, counts.iter().copied().max().unwrap_or(0) + 1);
    let mut pages = vec![0xff_u8; page_count * case.kv_heads * layout.page_bytes()];
    // Page 0 stays unused.
    let mut free = (0..page_count as u32).rev();
    let mut table = vec![u32::MAX; sequences.len() * width];
    for (i, (sequence, &count)) in sequences.iter().zip(&counts).enumerate() {
        for (j, page) in (0..count).zip(&mut free) {
            table[i * width + j] = page;
        }
        for t in 0..sequence.tokens {
            let page = table[i * width + t / case.page_tokens] as usize;
            for head in 0..case.kv_heads {
                let at = (page * case.kv_heads + head) * layout.page_bytes();
                let row = (t * case.kv_heads + head) * case.head_dim;
                let [key, value] = [&sequence.keys, &sequence.values].map(|x| &x[row..][..case.head_dim]);
                let page = &mut pages[at..][..layout.page_bytes()];
                layout.write(page, t % case.page_tokens, key, value).unwrap();
            }
        }
    }
    let queries: Vec<u8> = sequences.iter().flat_map(|s| encode(&s.query, case.query)).collect();
    let tokens: Vec<u32> = sequences.iter().map(|s| s.tokens as u32).collect();
    let max_tokens = sequences.iter().map(|s| s.tokens).max().unwrap_or(0);
    let plan = case.plan(sequences.len(), max_tokens);
    let mut variant = plan.variant.clone();
    if let Some(planted) = planted {
        variant.source = with_text(variant.source, planted);
    }
    let rows = sequences.len() * case.rows();
    let arguments = DecodeArguments {
        query: machine.buffer_from("query", &queries),
        query_stride: (case.heads() * case.head_dim) as u64,
        pages: if case.appended {
            append(&mut machine, case, sequences, &table, page_count)?
        } else {
            machine.buffer_from("pages", &pages)
        },
        page_stride: (case.kv_heads * layout.page_bytes()) as u64,
        head_stride: layout.page_bytes() as u64,
        table: machine.buffer_from("table", &bytes_of(&table)),
        table_stride: width as u32,
        table_head_stride: 0,
        tokens: machine.buffer_from("tokens", &bytes_of(&tokens)),
        first: first.map_or(0, |first| machine.buffer_from("first", &bytes_of(first))),
        count_stride: 1,
        count_head_stride: 0,
        scale: case.scale(),
        out: machine.buffer("out", 4 * rows * case.head_dim),
        lse: machine.buffer("lse", 4 * rows),
        tickets: machine.buffer_from("tickets", &vec![0; plan.tickets()]),
        workspace: machine.buffer("workspace", plan.workspace()),
    };
    let counters = machine.launch(&variant, &plan.launch, &plan.arguments(&arguments), order)?;
    let (out, lse) = (floats(&machine.bytes(arguments.out)), floats(&machine.bytes(arguments.lse)));
    // A launch resets its tickets.
    machine.fill(arguments.out, &[0xff; 4], rows * case.head_dim);
    machine.launch(&variant, &plan.launch, &plan.arguments(&arguments), order)?;
    if bits(&out) != bits(&floats(&machine.bytes(arguments.out))) {
        return Err("the second launch gives different results".to_owned());
    }
    let held = sequences.iter().map(|s| s.tokens).sum::<usize>() * case.kv_heads;
    let page_bytes_held = (held * layout.tile_bytes() / 16) as u64;
    Ok(Result { out, lse, page_bytes_read: counters.read_of("pages"), counters, page_bytes_held })
}

/// Starts with the last token of each sequence.
fn append(
    machine: &mut Machine,
    case: &Case,
    sequences: &[Sequence],
    table: &[u32],
    page_count: usize,
) -> std::result::Result<u64, String> {
    let (layout, row) = (case.layout(), case.kv_heads * case.head_dim);
    let (mut places, mut rows) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for (i, sequence) in sequences.iter().enumerate() {
        for t in (0..sequence.tokens).rev() {
            places[0].push(i as u32);
            places[1].push(t as u32);
            for (rows, x) in rows.iter_mut().zip([&sequence.keys, &sequence.values]) {
                rows.extend_from_slice(&x[t * row..][..row]);
            }
        }
    }
    let arguments = AppendArguments {
        keys: machine.buffer_from("keys", &encode(&rows[0], Float::F32)),
        key_stride: row as u64,
        values: machine.buffer_from("values", &encode(&rows[1], Float::F32)),
        value_stride: row as u64,
        sequence: machine.buffer_from("sequence", &bytes_of(&places[0])),
        position: machine.buffer_from("position", &bytes_of(&places[1])),
        table: machine.buffer_from("table of append", &bytes_of(table)),
        table_stride: (table.len() / sequences.len()) as u32,
        pages: machine.buffer("pages", page_count * case.kv_heads * layout.page_bytes()),
        page_stride: (case.kv_heads * layout.page_bytes()) as u64,
        head_stride: layout.page_bytes() as u64,
        page_count: page_count as u32,
        refused: 0,
    };
    let shape = AppendShape { layout, kv_heads: case.kv_heads, tokens: places[0].len(), input: Float::F32 };
    let plan = shape.plan().map_err(|e| e.to_string())?;
    machine.launch(&plan.variant, &plan.launch, &plan.arguments(&arguments), Order::Straight)?;
    Ok(arguments.pages)
}

/// The replaced part must occur exactly once.
pub fn with_text(source: &'static Source, [from, to]: [&str; 2]) -> &'static Source {
    let texts = std::iter::once(source.text).chain(source.headers.iter().map(|header| header.1));
    assert_eq!(texts.map(|text| text.matches(from).count()).sum::<usize>(), 1, "{from}");
    let replaced = |text: &str| -> &'static str { text.replace(from, to).leak() };
    let headers: Vec<_> = source.headers.iter().map(|&(name, text)| (name, replaced(text))).collect();
    Box::leak(Box::new(Source { name: source.name, text: replaced(source.text), headers: headers.leak() }))
}

/// Returns the largest ratio of error to bound.
pub fn check(case: &Case, sequences: &[Sequence], first: Option<&[u32]>, result: &Result) -> f64 {
    share(case, sequences, first, result, false).unwrap_or_else(|off| panic!("{case:?}: {off}"))
}

/// [`check`] with the tighter bounds of random numbers: `2⁻¹¹` of the largest value, which is the error of rounding
/// weights to f16, and `2⁻¹³` for log-sum-exps.
pub fn check_random(case: &Case, sequences: &[Sequence], first: Option<&[u32]>, result: &Result) -> f64 {
    share(case, sequences, first, result, true).unwrap_or_else(|off| panic!("{case:?}: {off}"))
}

pub fn share(
    case: &Case,
    sequences: &[Sequence],
    first: Option<&[u32]>,
    result: &Result,
    is_random: bool,
) -> std::result::Result<f64, String> {
    let mut share = 0.0_f64;
    for (i, sequence) in sequences.iter().enumerate() {
        let from = first.map_or(0, |first| first[i] as usize);
        for kv_head in 0..case.kv_heads {
            let held = sequence.held(case, kv_head);
            let heads = kv_head * case.group..(kv_head + 1) * case.group;
            for (number, head) in
                (0..case.queries).flat_map(|number| heads.clone().map(move |head| (number, head)))
            {
                let row = number * case.heads() + head;
                let query = sequence.query_of(case, row);
                let row = i * case.rows() + row;
                let out = &result.out[row * case.head_dim..][..case.head_dim];
                let seen = (sequence.tokens + number + 1).saturating_sub(case.queries);
                if from >= seen {
                    if out.iter().any(|x| x.to_bits() != 0) || result.lse[row] != f32::NEG_INFINITY {
                        return Err(format!(
                            "sequence {i}, row {row}: the result is not zero, but the query sees no tokens"
                        ));
                    }
                    continue;
                }
                let is_bf16 = case.query == Float::Bf16;
                let mut expected = held.attend(&query, f64::from(case.scale()), from..seen, is_bf16);
                if is_random {
                    expected.lse_bound = expected.lse_bound.min(2.0_f64.powi(-13));
                    let near = expected.widest * 2.0_f64.powi(-11);
                    expected.bound.iter_mut().for_each(|bound| *bound = bound.min(near));
                }
                let off = (f64::from(result.lse[row]) - expected.lse).abs();
                if off.is_nan() || off > expected.lse_bound {
                    return Err(format!("row {row}: lse {} for {}", result.lse[row], expected.lse));
                }
                for ((got, wanted), bound) in out.iter().zip(&expected.out).zip(&expected.bound) {
                    let off = (f64::from(*got) - wanted).abs();
                    if off.is_nan() || off > *bound {
                        return Err(format!("sequence {i}, row {row}: {got} for {wanted} ± {bound}"));
                    }
                    share = share.max(off / bound);
                }
            }
        }
    }
    Ok(share)
}

pub fn rounded(x: f32, float: Float) -> f32 {
    match float {
        Float::F16 => half::f16::from_f32(x).to_f32(),
        Float::Bf16 => half::bf16::from_f32(x).to_f32(),
        Float::F32 => x,
    }
}

pub fn encode(x: &[f32], float: Float) -> Vec<u8> {
    x.iter()
        .flat_map(|&x| match float {
            Float::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
            Float::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
            Float::F32 => x.to_le_bytes().to_vec(),
        })
        .collect()
}

pub fn bytes_of(x: &[u32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
