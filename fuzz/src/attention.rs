//! Attention: appending to pages, and attending to arbitrary page lists.

use quant_kernels_cpu::attention::{
    Heads, KvCache, KvLayout, KvPages, KvType, PAGE_TOKENS, PageList, Workspace, merge,
};
use quant_kernels_cpu::{Isa, Serial};

use crate::bits;
use crate::input::Input;

const KINDS: [KvType; 3] = [KvType::Kv4, KvType::Kv8, KvType::F16];

struct List {
    pages: Vec<u32>,
    tokens: usize,
    first: usize,
    seen: isize,
}

impl List {
    fn view(&self) -> PageList<'_> {
        PageList { pages: &self.pages, tokens: self.tokens, first: self.first, seen: self.seen }
    }

    fn corrupt(&mut self, input: &mut Input<'_>) {
        match input.below(5) {
            0 => self.tokens = input.word(),
            1 => self.first = input.word(),
            2 => self.seen = input.word() as isize,
            3 => self.pages.truncate(input.below(self.pages.len() + 1)),
            _ => {
                let (at, any) = (input.below(self.pages.len()), input.word() as u32);
                if let Some(page) = self.pages.get_mut(at) {
                    *page = any;
                }
            }
        }
    }
}

/// Lists may share pages for reading, but not for writing, so each page belongs to one list.
fn lists(input: &mut Input<'_>, kv: usize, blocks: usize) -> Vec<List> {
    let turn = input.below(kv * blocks);
    let number = |at: usize| ((at + turn) % (kv * blocks)) as u32;
    let list = |head| List {
        pages: (0..blocks).map(|block| number(block * kv + head)).collect(),
        tokens: 0,
        first: 0,
        seen: isize::MAX,
    };
    (0..kv).map(list).collect()
}

/// Appends to pages and to a cache, then attends with valid and invalid lists. Instruction sets must give the same
/// results, except that AVX-512 BF16 may differ with quantized pages.
///
/// # Panics
/// If a property does not hold.
pub fn attention(data: &[u8]) {
    let mut input = Input::new(data);
    let layout = KvLayout::new(KINDS[input.below(3)], 16 * input.size(5)).expect("a multiple of 16");
    let (d, kv, group, blocks) = (layout.head_dim(), input.size(3), input.size(5), input.size(20));
    let heads = Heads { query: kv * group, kv, scale: f32::from(input.byte() as i8) / 64.0 };
    let mut lists = lists(&mut input, kv, blocks);
    // Unwritten memory may hold any bytes; these are NaN as f16.
    let mut pages = vec![0xff; kv * blocks * layout.page_bytes()];
    let mut cache = KvCache::new(layout, heads, blocks * PAGE_TOKENS).expect("enough memory");
    let mut tokens = 0;
    for _ in 0..input.size(3) {
        let m = input.below(100).min(blocks * PAGE_TOKENS + 1);
        let few = [input.floats(kv * d + 7), input.floats(kv * d + 5)];
        let [keys, values] =
            few.map(|few| few.iter().copied().cycle().take(m * kv * d).collect::<Vec<f32>>());
        let before = (m == 0).then(|| pages.clone());
        let views: Vec<_> = lists.iter().map(List::view).collect();
        let outcome = layout.append(&mut pages, &views, &keys, &values, &Serial);
        assert_eq!(outcome.is_ok(), cache.append(&keys, &values, &Serial).is_ok());
        assert!(before.is_none_or(|before| before == pages));
        tokens += if outcome.is_ok() { m } else { 0 };
        assert_eq!(cache.tokens(), tokens);
        if input.rarely(4) {
            tokens = input.below(tokens + 1);
            cache.truncate(tokens).expect("at most the cached tokens");
        }
        lists.iter_mut().for_each(|list| list.tokens = tokens);
    }

    let m = input.below(6).min(tokens);
    let q = input.floats(m * heads.query * d);
    let causal = (tokens + 1) as isize - m as isize;
    lists.iter_mut().for_each(|list| list.seen = causal);
    let run = |isa: Isa, pages: &[u8], lists: &[List], words: usize| {
        let token = isa.token().expect("an available instruction set");
        let (mut out, mut lse) = (vec![7.0; q.len()], vec![7.0; m * heads.query]);
        let views: Vec<_> = lists.iter().map(List::view).collect();
        let of = KvPages::new(layout, layout.id(), pages).expect("whole pages");
        let mut workspace = vec![u32::MAX; words];
        let outcome = of.attend(token, heads, &views, &q, &mut out, &mut lse, &mut workspace, &Serial);
        outcome.map(|()| (out, lse))
    };
    let room = |tokens| KvPages::workspace(&layout, heads, m, tokens);
    let words = room(tokens).expect("a small size");
    let (mut first, mut detected) = (None, None);
    for isa in Isa::available() {
        let (out, lse) = run(isa, &pages, &lists, words).expect("matching shapes");
        let first: &(Vec<u32>, Vec<u32>) = first.get_or_insert_with(|| (bits(&out), bits(&lse)));
        assert_eq!(bits(&lse), first.1, "{isa:?}");
        if isa != Isa::Avx512Bf16 || layout.kind() == KvType::F16 {
            assert_eq!(bits(&out), first.0, "{isa:?}");
        }
        if isa == Isa::detect() {
            detected = Some((out, lse));
        }
    }
    if let Some((mut out, mut lse)) = detected {
        let (mut again, mut again_lse) = (vec![7.0; out.len()], vec![7.0; lse.len()]);
        let mut workspace = Workspace::default();
        cache.prefill(&q, &mut again, &mut again_lse, &mut workspace, &Serial).expect("matching shapes");
        assert_eq!([bits(&again), bits(&again_lse)], [bits(&out), bits(&lse)]);
        let nothing = (vec![0.0; out.len()], vec![f32::NEG_INFINITY; lse.len()]);
        merge(d, &mut out, &mut lse, &nothing.0, &nothing.1).expect("equal lengths");
        assert_eq!([bits(&again), bits(&again_lse)], [bits(&out), bits(&lse)]);
    }

    let _ = run(Isa::detect(), &pages, &lists, input.below(words + 1));
    let (at, len) = (input.below(pages.len()), input.below(600));
    let end = (at + len).min(pages.len());
    let noise = input.bytes(end - at);
    pages[at..end].copy_from_slice(&noise);
    for _ in 0..input.below(4) {
        let which = input.below(kv);
        lists[which].corrupt(&mut input);
    }
    let max = lists.iter().map(|list| list.tokens).max().unwrap_or(0);
    let words = room(max).ok().filter(|&words| words < 1 << 20).unwrap_or(words);
    let mut first = None;
    for isa in Isa::available() {
        let is_ok = run(isa, &pages, &lists, words).is_ok();
        assert_eq!(*first.get_or_insert(is_ok), is_ok, "{isa:?}");
    }
    let few = input.floats(kv * d);
    let views: Vec<_> = lists.iter().map(List::view).collect();
    let _ = layout.append(&mut pages, &views, &few, &few, &Serial);
}
