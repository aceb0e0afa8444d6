//! Attention through the interface: what it gives, and that every wrong call it can see is a status.

use core::ffi::c_void;
use core::ptr::{null, null_mut};

use quant_kernels::qz1_status::*;
use quant_kernels::*;

const D: usize = 32;
const KV: usize = 2;
const QUERY: usize = 4;
const TOKENS: usize = 100;
const M: usize = 3;
/// Pages of both heads, and one that nobody names.
const PAGES: usize = 5;

/// Everything of a call, as it should be.
struct Case {
    layout: qz1_kv_layout,
    heads: qz1_heads,
    numbers: [[u32; 2]; KV],
    keys: Vec<f32>,
    values: Vec<f32>,
    q: Vec<f32>,
    pages: Vec<u8>,
    out: Vec<f32>,
    lse: Vec<f32>,
    workspace: Vec<u32>,
}

fn noise(len: usize, by: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * by) % 101) as f32 / 32.0 - 1.5).collect()
}

fn layout_of(kind: u32) -> qz1_kv_layout {
    let size = size_of::<qz1_kv_layout>() as u32;
    let mut layout =
        qz1_kv_layout { struct_size: size, kind: 0, head_dim: 0, page_tokens: 0, page_bytes: 0, id: 0 };
    // SAFETY: all lives.
    assert_eq!(unsafe { qz1_kv_layout_of(kind, D, &mut layout, null()) }, Ok);
    layout
}

impl Case {
    /// Tokens are there, all seen, but no query was answered.
    fn new(kind: u32) -> Self {
        let layout = layout_of(kind);
        let size = size_of::<qz1_heads>() as u32;
        let heads = qz1_heads { struct_size: size, scale: 0.2, query: QUERY, kv: KV };
        let mut case = Self {
            layout,
            heads,
            numbers: [[3, 0], [1, 4]],
            keys: noise(TOKENS * KV * D, 37),
            values: noise(TOKENS * KV * D, 53),
            q: noise(M * QUERY * D, 29),
            pages: vec![0xff; PAGES * layout.page_bytes as usize],
            out: vec![7.0; M * QUERY * D],
            lse: vec![7.0; M * QUERY],
            workspace: Vec::new(),
        };
        let (lists, [x, y]) = (case.lists(0), [&case.keys, &case.values].map(|x| (x.as_ptr(), x.len())));
        let to = (case.pages.as_mut_ptr(), case.pages.len());
        assert_eq!(case.append(&case.layout, to, (lists.as_ptr(), KV), x, y, null()), Ok);
        let mut words = 0;
        // SAFETY: all lives.
        assert_eq!(unsafe { qz1_attend_workspace(&layout, &heads, M, TOKENS, &mut words, null()) }, Ok);
        case.workspace = vec![u32::MAX; words];
        case
    }

    fn lists(&self, tokens: usize) -> [qz1_page_list; KV] {
        core::array::from_fn(|head| qz1_page_list {
            struct_size: size_of::<qz1_page_list>() as u32,
            reserved: 0,
            pages: self.numbers[head].as_ptr(),
            pages_len: 2,
            tokens,
            first: 0,
            seen: isize::MAX,
        })
    }

    fn append(
        &self,
        layout: *const qz1_kv_layout,
        to: (*mut u8, usize),
        lists: (*const qz1_page_list, usize),
        keys: (*const f32, usize),
        values: (*const f32, usize),
        parallel: *const qz1_parallel,
    ) -> qz1_status {
        // SAFETY: all lives, and is as long as a length that is taken.
        unsafe {
            qz1_kv_append(
                layout,
                to.0,
                to.1,
                lists.0,
                lists.1,
                keys.0,
                keys.1,
                values.0,
                values.1,
                parallel,
                null(),
            )
        }
    }

    fn call(&mut self) -> Call {
        Call {
            layout: &self.layout,
            pages: (self.pages.as_ptr(), self.pages.len()),
            heads: &self.heads,
            lists: (null(), KV),
            q: (self.q.as_ptr(), self.q.len()),
            out: (self.out.as_mut_ptr(), self.out.len()),
            lse: (self.lse.as_mut_ptr(), self.lse.len()),
            workspace: (self.workspace.as_mut_ptr(), self.workspace.len()),
            isa: QZ1_ISA_DETECT,
            parallel: null(),
        }
    }

    /// Attends to some lists.
    fn run(&mut self, lists: &[qz1_page_list]) -> qz1_status {
        Call { lists: (lists.as_ptr(), lists.len()), ..self.call() }.run()
    }

    /// The same with one thing changed, which must leave the output alone if it is refused.
    fn with(&mut self, change: impl FnOnce(&mut Call)) -> qz1_status {
        let lists = self.lists(TOKENS);
        let mut call = Call { lists: (lists.as_ptr(), KV), ..self.call() };
        change(&mut call);
        self.out.fill(7.0);
        let status = call.run();
        assert!(status == Ok || status == ForEach || self.out.iter().all(|v| *v == 7.0));
        status
    }

    fn with_lists(&mut self, change: impl FnOnce(&mut [qz1_page_list; KV])) -> qz1_status {
        let mut lists = self.lists(TOKENS);
        change(&mut lists);
        self.run(&lists)
    }
}

/// The arguments of `qz1_attend`.
struct Call {
    layout: *const qz1_kv_layout,
    pages: (*const u8, usize),
    heads: *const qz1_heads,
    lists: (*const qz1_page_list, usize),
    q: (*const f32, usize),
    out: (*mut f32, usize),
    lse: (*mut f32, usize),
    workspace: (*mut u32, usize),
    isa: u32,
    parallel: *const qz1_parallel,
}

impl Call {
    fn run(&self) -> qz1_status {
        // SAFETY: all lives, and is as long as a length that is taken.
        unsafe {
            qz1_attend(
                self.layout,
                self.pages.0,
                self.pages.1,
                self.heads,
                self.lists.0,
                self.lists.1,
                self.q.0,
                self.q.1,
                self.out.0,
                self.out.1,
                self.lse.0,
                self.lse.1,
                self.workspace.0,
                self.workspace.1,
                self.isa,
                self.parallel,
                null(),
            )
        }
    }
}

/// A handle that is freed at the end.
struct Cache(*mut qz1_kv_cache);

impl Cache {
    fn new(layout: &qz1_kv_layout, heads: &qz1_heads, max_tokens: usize) -> Self {
        let mut cache = null_mut();
        // SAFETY: all lives.
        let status = unsafe { qz1_kv_cache_new(layout, heads, max_tokens, &mut cache, null()) };
        assert_eq!(status, Ok);
        Self(cache)
    }

    fn append(&self, keys: &[f32], values: &[f32], parallel: *const qz1_parallel) -> qz1_status {
        let (k, v) = (keys.as_ptr(), values.as_ptr());
        // SAFETY: all lives.
        unsafe { qz1_kv_cache_append(self.0, k, keys.len(), v, values.len(), parallel, null()) }
    }

    fn tokens(&self) -> usize {
        // SAFETY: it lives.
        unsafe { qz1_kv_cache_tokens(self.0) }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { qz1_kv_cache_free(self.0) }
    }
}

/// Runs every piece, or all but the last.
unsafe extern "C" fn on_one(ctx: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void) {
    let left_out = usize::from(!ctx.is_null());
    for i in (left_out..count).rev() {
        // SAFETY: as the interface asks for.
        unsafe { piece.unwrap()(work, i) };
    }
}

fn threads(forgetful: bool) -> qz1_parallel {
    let ctx = if forgetful { core::ptr::dangling_mut() } else { null_mut() };
    qz1_parallel { struct_size: size_of::<qz1_parallel>() as u32, threads: 3, ctx, for_each: Some(on_one) }
}

/// Pages and cache give the same bits, in one part or two.
#[test]
fn pages_and_caches_agree() {
    assert_eq!(qz1_has(QZ1_FEATURE_ATTENTION), 1);
    assert_eq!(qz1_has(QZ1_FEATURE_ATTENTION + 1), 0);
    for kind in [QZ1_KV_4BIT, QZ1_KV_8BIT, QZ1_KV_F16] {
        let mut case = Case::new(kind);
        let causal = (TOKENS - M + 1) as isize;
        let seen = |list: &mut qz1_page_list| list.seen = causal;
        assert_eq!(case.with_lists(|lists| lists.iter_mut().for_each(seen)), Ok);
        let cache = Cache::new(&case.layout, &case.heads, TOKENS);
        let half = 37 * KV * D;
        assert_eq!(cache.append(&case.keys[..half], &case.values[..half], null()), Ok);
        assert_eq!(cache.append(&case.keys[half..], &case.values[half..], &threads(false)), Ok);
        assert_eq!(cache.tokens(), TOKENS);
        let (mut out, mut lse) = (vec![0.0; case.out.len()], vec![0.0; case.lse.len()]);
        let (to, to_lse) = ((out.as_mut_ptr(), out.len()), (lse.as_mut_ptr(), lse.len()));
        let row = QUERY * D;
        // SAFETY: all lives.
        unsafe {
            assert!(qz1_kv_cache_bytes(cache.0) == 4 * case.layout.page_bytes as usize);
            let q = case.q.as_ptr();
            let status = qz1_kv_cache_prefill(
                cache.0,
                q,
                case.q.len(),
                to.0,
                to.1,
                to_lse.0,
                to_lse.1,
                null(),
                null(),
            );
            assert_eq!(status, Ok);
            assert_eq!((&out, &lse), (&case.out, &case.lse));
            // The last query alone.
            let (to, last) = (out.as_mut_ptr(), q.add(2 * row));
            let status =
                qz1_kv_cache_decode(cache.0, last, row, to, row, to_lse.0, QUERY, &threads(false), null());
            assert_eq!(status, Ok);
            assert_eq!((&out[..row], &lse[..QUERY]), (&case.out[2 * row..], &case.lse[2 * QUERY..]));
            assert_eq!(qz1_kv_cache_truncate(cache.0, 5, null()), Ok);
            assert_eq!(cache.tokens(), 5);
            assert_eq!(qz1_kv_cache_clear(cache.0, null()), Ok);
            assert_eq!(cache.tokens(), 0);
        }
        // The first page and the rest are the whole, but for roundings.
        let whole = (case.out.clone(), case.lse.clone());
        let part = |list: &mut qz1_page_list| (list.seen, list.tokens) = (causal, 64);
        assert_eq!(case.with_lists(|lists| lists.iter_mut().for_each(part)), Ok);
        let first = (case.out.clone(), case.lse.clone());
        let part = |list: &mut qz1_page_list| (list.seen, list.first) = (causal, 64);
        assert_eq!(case.with_lists(|lists| lists.iter_mut().for_each(part)), Ok);
        let (to, to_lse) = (case.out.as_mut_ptr(), case.lse.as_mut_ptr());
        let (n, rows, other, other_lse) = (case.out.len(), M * QUERY, first.0.as_ptr(), first.1.as_ptr());
        // SAFETY: all lives.
        let status = unsafe { qz1_attend_merge(D, to, n, to_lse, rows, other, n, other_lse, rows, null()) };
        assert_eq!(status, Ok);
        assert!(case.out.iter().zip(&whole.0).all(|(a, b)| (a - b).abs() <= 0.01));
        assert!(case.lse.iter().zip(&whole.1).all(|(a, b)| (a - b).abs() <= 1e-5));
    }
}

#[test]
fn layouts_that_are_none() {
    let mut layout = layout_of(QZ1_KV_4BIT);
    assert_eq!(layout.page_bytes, 64 * (D as u64 + 8));
    // SAFETY: all lives.
    unsafe {
        assert_eq!(qz1_kv_layout_of(0, D, &mut layout, null()), Scheme);
        assert_eq!(qz1_kv_layout_of(4, D, &mut layout, null()), Scheme);
        for d in [0, 8, 33, 528, usize::MAX] {
            assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, d, &mut layout, null()), Scheme);
        }
        assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, D, null_mut(), null()), Null);
        let odd = (&raw mut layout).wrapping_byte_add(1);
        assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, D, odd, null()), Misaligned);
        layout.struct_size -= 1;
        assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, D, &mut layout, null()), StructSize);
    }
    let mut case = Case::new(QZ1_KV_4BIT);
    let changes: [&dyn Fn(&mut qz1_kv_layout); 8] = [
        &|l| l.kind = QZ1_KV_8BIT,
        &|l| l.kind = 99,
        &|l| l.head_dim = 48,
        &|l| l.head_dim = 0,
        &|l| l.head_dim = u32::MAX,
        &|l| l.page_tokens = 32,
        &|l| l.page_bytes += 64,
        &|l| l.id ^= 1,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut layout = case.layout;
        change(&mut layout);
        assert_eq!(case.with(|call| call.layout = &layout), LayoutId, "change {i}");
    }
    let short = qz1_kv_layout { struct_size: 8, ..case.layout };
    assert_eq!(case.with(|call| call.layout = &short), StructSize);
}

#[test]
fn tokens_are_written_and_read() {
    let layout = layout_of(QZ1_KV_8BIT);
    let len = layout.page_bytes as usize;
    let (mut page, key, value) = (vec![7_u8; len], noise(D, 3), noise(D, 5));
    let at = page.as_mut_ptr();
    let (mut k, mut v) = (vec![0.0; D], vec![0.0; D]);
    let (k_at, v_at) = (k.as_mut_ptr(), v.as_mut_ptr());
    let write = |layout: *const qz1_kv_layout, at, len, slot, key: (*const f32, usize), value: &[f32]| {
        let (v, v_len) = (value.as_ptr(), value.len());
        // SAFETY: all lives, and is as long as a length that is taken.
        unsafe { qz1_kv_write(layout, at, len, slot, key.0, key.1, v, v_len, null()) }
    };
    let read = |at, len, slot, key: (*mut f32, usize), value: (*mut f32, usize)| {
        // SAFETY: as above.
        unsafe { qz1_kv_read(&layout, at, len, slot, key.0, key.1, value.0, value.1, null()) }
    };
    let good = (key.as_ptr(), D);
    assert_eq!(write(null(), at, len, 0, good, &value), Null);
    assert_eq!(write(&layout, null_mut(), len, 0, good, &value), Null);
    assert_eq!(write(&layout, at, len - 1, 0, good, &value), Length);
    assert_eq!(write(&layout, at, usize::MAX, 0, good, &value), TooLarge);
    assert_eq!(write(&layout, at, len, 64, good, &value), Mismatch);
    assert_eq!(write(&layout, at, len, usize::MAX, good, &value), Mismatch);
    assert_eq!(write(&layout, at, len, 0, (null(), D), &value), Null);
    assert_eq!(write(&layout, at, len, 0, (key.as_ptr().wrapping_byte_add(2), D - 1), &value), Misaligned);
    assert_eq!(write(&layout, at, len, 0, (key.as_ptr(), D - 1), &value), Length);
    assert_eq!(write(&layout, at, len, 0, good, &value[1..]), Length);
    let whole = at.cast::<f32>().cast_const();
    if whole.is_aligned() {
        assert_eq!(write(&layout, at, len, 0, (whole, D), &value), Overlap);
    }
    for (bad, status) in [(f32::NAN, Scheme), (f32::INFINITY, Scheme), (65505.0, TooLarge)] {
        let mut value = value.clone();
        value[9] = bad;
        assert_eq!(write(&layout, at, len, 0, good, &value), status);
    }
    assert!(page.iter().all(|b| *b == 7));
    assert_eq!(write(&layout, at, len, 63, good, &value), Ok);
    let (to_k, to_v) = ((k_at, D), (v_at, D));
    assert_eq!(read(null(), len, 63, to_k, to_v), Null);
    assert_eq!(read(at, len - 1, 63, to_k, to_v), Length);
    assert_eq!(read(at, len, 64, to_k, to_v), Mismatch);
    assert_eq!(read(at, len, 63, (k_at, D - 1), to_v), Length);
    assert_eq!(read(at, len, 63, (null_mut(), D), to_v), Null);
    assert_eq!(read(at, len, 63, to_k, (k_at.wrapping_add(D - 1), D)), Overlap);
    assert_eq!(read(at, len, 63, to_k, to_v), Ok);
    for (got, x) in [(&k, &key), (&v, &value)] {
        // A grid of 255 steps over 3.2 at most.
        assert!(got.iter().zip(x).all(|(got, x)| (got - x).abs() <= 3.2 / 255.0 / 2.0 + 1e-3));
    }
}

#[test]
fn appending() {
    let mut case = Case::new(QZ1_KV_4BIT);
    case.pages.fill(7);
    let to = (case.pages.as_mut_ptr(), case.pages.len());
    let [x, y] = [&case.keys, &case.values].map(|x| (x.as_ptr(), x.len()));
    let lists = case.lists(0);
    let good = (lists.as_ptr(), KV);
    let run = |to, lists, x, y| case.append(&case.layout, to, lists, x, y, null());
    assert_eq!(case.append(null(), to, good, x, y, null()), Null);
    assert_eq!(run((null_mut(), to.1), good, x, y), Null);
    assert_eq!(run((to.0, to.1 - 1), good, x, y), Length);
    assert_eq!(run(to, (null(), KV), x, y), Null);
    assert_eq!(run(to, (good.0.wrapping_byte_add(4), KV - 1), x, y), Misaligned);
    assert_eq!(run(to, (good.0, usize::MAX), x, y), TooLarge);
    assert_eq!(run(to, (good.0, 0), x, y), Mismatch);
    assert_eq!(run(to, good, (null(), x.1), y), Null);
    assert_eq!(run(to, good, (x.0, x.1 - 1), y), Length);
    assert_eq!(run(to, good, x, (y.0, y.1 - 1)), Length);
    assert_eq!(run(to, good, (x.0, usize::MAX / 2), y), TooLarge);
    assert_eq!(run((x.0.cast_mut().cast(), to.1), good, x, y), Overlap);
    let with = |change: &dyn Fn(&mut [qz1_page_list; KV])| {
        let mut lists = lists;
        change(&mut lists);
        run(to, (lists.as_ptr(), KV), x, y)
    };
    assert_eq!(with(&|l| l[1].pages_len = 1), Mismatch);
    assert_eq!(with(&|l| l[1].pages = l[0].pages), Mismatch);
    assert_eq!(with(&|l| l[1].pages = null()), Null);
    assert_eq!(with(&|l| l[1].tokens = 64), Mismatch);
    assert_eq!(with(&|l| l[1].tokens = usize::MAX), TooLarge);
    assert_eq!(with(&|l| l[1].struct_size = 8), StructSize);
    let beyond = [1, PAGES as u32];
    assert_eq!(with(&|l| l[0].pages = beyond.as_ptr()), Mismatch);
    let mut bad = case.keys.clone();
    bad[1000] = f32::NAN;
    assert_eq!(run(to, good, (bad.as_ptr(), bad.len()), y), Scheme);
    assert!(case.pages.iter().all(|b| *b == 7));
    assert_eq!(case.append(&case.layout, to, good, x, y, &threads(true)), ForEach);
    assert_eq!(case.append(&case.layout, to, good, x, y, &threads(false)), Ok);
}

#[test]
fn workspaces() {
    let case = Case::new(QZ1_KV_8BIT);
    let mut words = 77;
    let mut run = |layout: *const qz1_kv_layout, heads: *const qz1_heads, queries, tokens| {
        // SAFETY: all lives.
        unsafe { qz1_attend_workspace(layout, heads, queries, tokens, &mut words, null()) }
    };
    let heads = &raw const case.heads;
    assert_eq!(run(null(), heads, 1, 1), Null);
    assert_eq!(run(&case.layout, null(), 1, 1), Null);
    assert_eq!(run(&case.layout, heads, usize::MAX, 1), TooLarge);
    assert_eq!(run(&case.layout, heads, 1, usize::MAX), TooLarge);
    let with = |heads| run(&case.layout, &raw const heads, 1, 1);
    let changed: [(qz1_heads, qz1_status); 7] = [
        (qz1_heads { query: 3, ..case.heads }, Mismatch),
        (qz1_heads { query: 0, ..case.heads }, Mismatch),
        (qz1_heads { kv: 0, ..case.heads }, Mismatch),
        (qz1_heads { query: usize::MAX - 1, ..case.heads }, TooLarge),
        (qz1_heads { scale: f32::NAN, ..case.heads }, Scheme),
        (qz1_heads { scale: f32::INFINITY, ..case.heads }, Scheme),
        (qz1_heads { struct_size: 4, ..case.heads }, StructSize),
    ];
    let got: Vec<_> = changed.map(|(heads, _)| heads).into_iter().map(with).collect();
    assert_eq!(got, changed.map(|(_, status)| status));
    assert_eq!(words, 77);
    // SAFETY: all lives.
    let status = unsafe { qz1_attend_workspace(&case.layout, heads, 1, 1, null_mut(), null()) };
    assert_eq!(status, Null);
}

#[test]
fn attending() {
    let mut case = Case::new(QZ1_KV_4BIT);
    assert_eq!(case.with(|_| {}), Ok);
    assert_eq!(case.with(|c| c.isa = QZ1_ISA_SCALAR), Ok);
    assert_eq!(case.with(|c| c.isa = 77), Isa);
    assert_eq!(case.with(|c| c.layout = null()), Null);
    assert_eq!(case.with(|c| c.pages.0 = null()), Null);
    assert_eq!(case.with(|c| c.pages.1 -= 1), Length);
    assert_eq!(case.with(|c| c.pages.1 -= case_page()), Mismatch);
    assert_eq!(case.with(|c| c.pages.1 = 0), Mismatch);
    assert_eq!(case.with(|c| c.heads = null()), Null);
    assert_eq!(case.with(|c| c.heads = c.heads.wrapping_byte_add(1)), Misaligned);
    let odd = qz1_heads { query: 5, ..case.heads };
    assert_eq!(case.with(|c| c.heads = &odd), Mismatch);
    assert_eq!(case.with(|c| c.lists.0 = null()), Null);
    assert_eq!(case.with(|c| c.lists.1 -= 1), Length);
    assert_eq!(case.with(|c| c.q.0 = null()), Null);
    assert_eq!(case.with(|c| c.q.1 -= 1), Length);
    assert_eq!(case.with(|c| c.q.0 = c.q.0.wrapping_byte_add(1)), Misaligned);
    assert_eq!(case.with(|c| c.out.0 = null_mut()), Null);
    assert_eq!(case.with(|c| c.out.1 -= 1), Length);
    assert_eq!(case.with(|c| c.out.0 = c.out.0.wrapping_byte_add(2)), Misaligned);
    assert_eq!(case.with(|c| c.out.1 = usize::MAX / 2), TooLarge);
    assert_eq!(case.with(|c| c.out.0 = c.q.0.cast_mut()), Overlap);
    assert_eq!(case.with(|c| c.out.0 = c.lse.0), Overlap);
    assert_eq!(case.with(|c| c.out.0 = c.workspace.0.cast()), Overlap);
    assert_eq!(case.with(|c| c.lse.0 = null_mut()), Null);
    assert_eq!(case.with(|c| c.lse.1 -= 1), Length);
    assert_eq!(case.with(|c| c.lse.0 = c.workspace.0.cast()), Overlap);
    assert_eq!(case.with(|c| c.lse.0 = c.pages.0.cast_mut().cast()), Overlap);
    assert_eq!(case.with(|c| c.workspace.0 = null_mut()), Null);
    assert_eq!(case.with(|c| c.workspace.1 -= 1), Length);
    assert_eq!(case.with(|c| c.workspace.0 = c.workspace.0.wrapping_byte_add(1)), Misaligned);
    assert_eq!(case.with(|c| c.workspace.0 = c.q.0.cast_mut().cast()), Overlap);
    let (forgetful, all) = (threads(true), threads(false));
    assert_eq!(case.with(|c| c.parallel = &forgetful), ForEach);
    assert_eq!(case.with(|c| c.parallel = &all), Ok);
}

fn case_page() -> usize {
    layout_of(QZ1_KV_4BIT).page_bytes as usize
}

#[test]
fn lists_that_do_not_fit() {
    let mut case = Case::new(QZ1_KV_4BIT);
    assert_eq!(case.with_lists(|_| {}), Ok);
    let expected = case.out.clone();
    let beyond = [0, PAGES as u32];
    assert_eq!(case.with_lists(|l| l[1].pages = beyond.as_ptr()), Mismatch);
    let beyond = [u32::MAX; 2];
    assert_eq!(case.with_lists(|l| l[0].pages = beyond.as_ptr()), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].pages = null()), Null);
    assert_eq!(case.with_lists(|l| l[0].pages = l[0].pages.wrapping_byte_add(1)), Misaligned);
    assert_eq!(case.with_lists(|l| l[0].pages_len = 1), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].pages_len = usize::MAX), TooLarge);
    assert_eq!(case.with_lists(|l| l[0].tokens = 129), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].tokens = usize::MAX), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].first = TOKENS + 1), Mismatch);
    for size in [0, 8, u32::MAX] {
        assert_eq!(case.with_lists(|l| l[0].struct_size = size), StructSize);
        assert_eq!(case.with_lists(|l| l[1].struct_size = size), StructSize);
    }
    let size = size_of::<qz1_page_list>() as u32;
    assert_eq!(case.with_lists(|l| l[0].struct_size = size + 4), StructSize);
    assert_eq!(case.out, expected);
    // Nothing seen.
    assert_eq!(case.with_lists(|l| l[1].seen = isize::MIN), Ok);
    assert!(case.lse[2..4].iter().all(|v| *v == f32::NEG_INFINITY) && case.out[2 * D] == 0.0);
    assert_eq!(case.out[..2 * D], expected[..2 * D]);
    // Lists of a later version.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Later {
        list: qz1_page_list,
        new: u64,
    }
    let mut later = case.lists(TOKENS).map(|list| Later { list, new: 0 });
    later.iter_mut().for_each(|l| l.list.struct_size = size_of::<Later>() as u32);
    assert_eq!(Call { lists: (later.as_ptr().cast(), KV), ..case.call() }.run(), Ok);
    assert_eq!(case.out, expected);
    later[1].new = 1;
    assert_eq!(Call { lists: (later.as_ptr().cast(), KV), ..case.call() }.run(), StructSize);
}

#[test]
fn what_is_not_finite_stays_in_its_head() {
    let mut case = Case::new(QZ1_KV_8BIT);
    let lists = case.lists(TOKENS);
    assert_eq!(case.run(&lists), Ok);
    let expected = case.out.clone();
    case.q[D + 3] = f32::NAN;
    assert_eq!(case.run(&lists), Ok);
    assert!(case.lse[1].is_nan() && case.out[D..2 * D].iter().all(|v| v.is_nan()));
    assert!(case.out[..D] == expected[..D] && case.out[2 * D..] == expected[2 * D..]);
}

#[test]
fn merging() {
    let (mut out, mut lse) = (vec![1.0_f32; 2 * D], vec![0.0_f32; 2]);
    let (other, other_lse) = (vec![3.0_f32; 2 * D], vec![f32::NEG_INFINITY, 0.0]);
    let (n, to, to_lse) = (2 * D, out.as_mut_ptr(), lse.as_mut_ptr());
    let run = |d,
               out: (*mut f32, usize),
               lse: (*mut f32, usize),
               x: (*const f32, usize),
               y: (*const f32, usize)| {
        // SAFETY: all lives, and is as long as a length that is taken.
        unsafe { qz1_attend_merge(d, out.0, out.1, lse.0, lse.1, x.0, x.1, y.0, y.1, null()) }
    };
    let (x, y) = ((other.as_ptr(), n), (other_lse.as_ptr(), 2));
    assert_eq!(run(D, (null_mut(), n), (to_lse, 2), x, y), Null);
    assert_eq!(run(D, (to, n), (null_mut(), 2), x, y), Null);
    assert_eq!(run(D, (to, n), (to_lse, 2), (null(), n), y), Null);
    assert_eq!(run(D, (to, n), (to_lse, 2), x, (null(), 2)), Null);
    assert_eq!(run(D, (to, n - 1), (to_lse, 2), x, y), Length);
    assert_eq!(run(D, (to, n), (to_lse, 1), x, y), Length);
    assert_eq!(run(D, (to, n), (to_lse, 2), (x.0, n - 1), y), Length);
    assert_eq!(run(D, (to, n), (to_lse, 2), x, (y.0, 1)), Length);
    assert_eq!(run(usize::MAX, (to, n), (to_lse, 2), x, y), TooLarge);
    assert_eq!(run(D, (to, n), (to, 2), x, y), Overlap);
    assert_eq!(run(D, (to, n), (to_lse, 2), (to, n), y), Overlap);
    assert_eq!(run(D, (to.wrapping_byte_add(1), n - 1), (to_lse, 2), x, y), Misaligned);
    assert_eq!(run(D, (to, n), (to_lse, 2), x, y), Ok);
    assert!(out[..D].iter().all(|v| *v == 1.0) && out[D..].iter().all(|v| *v == 2.0));
    assert_eq!(lse, [0.0, 2.0_f32.ln()]);
}

#[test]
fn caches() {
    let case = Case::new(QZ1_KV_4BIT);
    let (layout, heads) = (case.layout, case.heads);
    let mut at = null_mut();
    let mut made = |layout: *const qz1_kv_layout, heads: *const qz1_heads, tokens| {
        // SAFETY: all lives.
        let status = unsafe { qz1_kv_cache_new(layout, heads, tokens, &mut at, null()) };
        assert!(at.is_null());
        status
    };
    assert_eq!(made(null(), &heads, 9), Null);
    assert_eq!(made(&layout, null(), 9), Null);
    assert_eq!(made(&qz1_kv_layout { id: 1, ..layout }, &heads, 9), LayoutId);
    assert_eq!(made(&layout, &qz1_heads { kv: 3, ..heads }, 9), Mismatch);
    assert_eq!(made(&layout, &heads, usize::MAX), TooLarge);
    assert_eq!(made(&layout, &qz1_heads { query: 1 << 50, kv: 1 << 50, ..heads }, 0), TooLarge);
    let cache = Cache::new(&layout, &heads, 60);
    let (keys, values) = (&case.keys[..50 * KV * D], &case.values[..50 * KV * D]);
    assert_eq!(cache.append(&keys[1..], &values[1..], null()), Length);
    assert_eq!(cache.append(keys, &values[KV * D..], null()), Length);
    assert_eq!(cache.append(&case.keys, &case.values, null()), TooLarge);
    let mut bad = keys.to_vec();
    bad[70] = f32::NAN;
    assert_eq!(cache.append(keys, &bad, null()), Scheme);
    assert_eq!(cache.append(keys, values, &threads(true)), ForEach);
    assert_eq!(cache.tokens(), 0);
    assert_eq!(cache.append(keys, values, null()), Ok);
    assert_eq!(cache.append(keys, values, null()), TooLarge);
    assert_eq!(cache.tokens(), 50);
    let (row, mut out, mut lse) = (QUERY * D, vec![0.0_f32; M * QUERY * D], vec![0.0_f32; M * QUERY]);
    let (q, to, to_lse) = (case.q.as_ptr(), out.as_mut_ptr(), lse.as_mut_ptr());
    type Run = unsafe extern "C" fn(
        *mut qz1_kv_cache,
        *const f32,
        usize,
        *mut f32,
        usize,
        *mut f32,
        usize,
        *const qz1_parallel,
        *const qz1_message,
    ) -> qz1_status;
    for run in [qz1_kv_cache_decode as Run, qz1_kv_cache_prefill as Run] {
        let run = |cache, q, q_len, out, out_len, lse, lse_len| {
            // SAFETY: all lives, and is as long as a length that is taken.
            unsafe { run(cache, q, q_len, out, out_len, lse, lse_len, null(), null()) }
        };
        assert_eq!(run(cache.0, q, row, to, row, to_lse, QUERY), Ok);
        assert_eq!(run(null_mut(), q, row, to, row, to_lse, QUERY), Null);
        assert_eq!(run(cache.0, null(), row, to, row, to_lse, QUERY), Null);
        assert_eq!(run(cache.0, q, row - 1, to, row, to_lse, QUERY), Length);
        assert_eq!(run(cache.0, q, row, null_mut(), row, to_lse, QUERY), Null);
        assert_eq!(run(cache.0, q, row, to, row + 1, to_lse, QUERY), Length);
        assert_eq!(run(cache.0, q, row, q.cast_mut(), row, to_lse, QUERY), Overlap);
        assert_eq!(run(cache.0, q, row, to, row, to, QUERY), Overlap);
        assert_eq!(run(cache.0, q, row, to, row, null_mut(), QUERY), Null);
        assert_eq!(run(cache.0, q, row, to, row, to_lse, QUERY - 1), Length);
        assert_eq!(run(cache.0, q, row, to.wrapping_byte_add(1), row, to_lse, QUERY), Misaligned);
    }
    // SAFETY: all lives.
    unsafe {
        let (n, rows) = (case.q.len(), M * QUERY);
        assert_eq!(qz1_kv_cache_decode(cache.0, q, n, to, n, to_lse, rows, null(), null()), Length);
        let forgetful = threads(true);
        let status = qz1_kv_cache_decode(cache.0, q, row, to, row, to_lse, QUERY, &forgetful, null());
        assert_eq!(status, ForEach);
        assert_eq!(qz1_kv_cache_truncate(cache.0, 51, null()), Mismatch);
        assert_eq!(qz1_kv_cache_truncate(null_mut(), 0, null()), Null);
        assert_eq!(qz1_kv_cache_truncate(cache.0, 2, null()), Ok);
        // More queries than tokens.
        assert_eq!(qz1_kv_cache_prefill(cache.0, q, n, to, n, to_lse, rows, null(), null()), Mismatch);
        assert_eq!(qz1_kv_cache_clear(null_mut(), null()), Null);
        let (x, len) = (keys.as_ptr(), keys.len());
        assert_eq!(qz1_kv_cache_append(null_mut(), x, len, x, len, null(), null()), Null);
        assert_eq!(qz1_kv_cache_append(cache.0, null(), len, x, len, null(), null()), Null);
        assert_eq!((qz1_kv_cache_tokens(null()), qz1_kv_cache_bytes(null())), (0, 0));
        assert_eq!(qz1_kv_cache_new(&layout, &heads, 9, null_mut(), null()), Null);
        qz1_kv_cache_free(null_mut());
    }
}
