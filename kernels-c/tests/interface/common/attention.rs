//! Pages, lists and a cache, with all arguments of a call.

use core::ptr::{null, null_mut};

use quant_kernels::qz1_status::*;
use quant_kernels::*;

use super::noise;

pub const D: usize = 32;
pub const KV: usize = 2;
pub const QUERY: usize = 4;
pub const TOKENS: usize = 100;
pub const M: usize = 3;
pub const PAGES: usize = 5;

pub struct Case {
    pub layout: qz1_kv_layout,
    pub heads: qz1_heads,
    pub numbers: [[u32; 2]; KV],
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub q: Vec<f32>,
    pub pages: Vec<u8>,
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub workspace: Vec<u32>,
}

pub fn layout_of(kind: u32) -> qz1_kv_layout {
    let size = size_of::<qz1_kv_layout>() as u32;
    let mut layout =
        qz1_kv_layout { struct_size: size, kind: 0, head_dim: 0, page_tokens: 0, page_bytes: 0, id: 0 };
    // SAFETY: every pointer is null or points to a live value.
    assert_eq!(unsafe { qz1_kv_layout_of(kind, D, &mut layout, null()) }, Ok);
    layout
}

impl Case {
    /// A call with all tokens appended and seen, before its queries are computed.
    pub fn new(kind: u32) -> Self {
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
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_attend_workspace(&layout, &heads, M, TOKENS, &mut words, null()) }, Ok);
        case.workspace = vec![u32::MAX; words];
        case
    }

    pub fn lists(&self, tokens: usize) -> [qz1_page_list; KV] {
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

    pub fn append(
        &self,
        layout: *const qz1_kv_layout,
        to: (*mut u8, usize),
        lists: (*const qz1_page_list, usize),
        keys: (*const f32, usize),
        values: (*const f32, usize),
        parallel: *const qz1_parallel,
    ) -> qz1_status {
        // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call
        // accepts.
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

    pub fn call(&mut self) -> Call {
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

    pub fn run(&mut self, lists: &[qz1_page_list]) -> qz1_status {
        Call { lists: (lists.as_ptr(), lists.len()), ..self.call() }.run()
    }

    /// Attends to all tokens with one change of the arguments. If the call fails, except for an incorrect `for_each`,
    /// the output must be unchanged.
    pub fn with(&mut self, change: impl FnOnce(&mut Call)) -> qz1_status {
        let lists = self.lists(TOKENS);
        let mut call = Call { lists: (lists.as_ptr(), KV), ..self.call() };
        change(&mut call);
        self.out.fill(7.0);
        let status = call.run();
        assert!(status == Ok || status == ForEach || self.out.iter().all(|v| *v == 7.0));
        status
    }

    pub fn with_lists(&mut self, change: impl FnOnce(&mut [qz1_page_list; KV])) -> qz1_status {
        let mut lists = self.lists(TOKENS);
        change(&mut lists);
        self.run(&lists)
    }
}

pub struct Call {
    pub layout: *const qz1_kv_layout,
    pub pages: (*const u8, usize),
    pub heads: *const qz1_heads,
    pub lists: (*const qz1_page_list, usize),
    pub q: (*const f32, usize),
    pub out: (*mut f32, usize),
    pub lse: (*mut f32, usize),
    pub workspace: (*mut u32, usize),
    pub isa: u32,
    pub parallel: *const qz1_parallel,
}

impl Call {
    pub fn run(&self) -> qz1_status {
        // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call
        // accepts.
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

/// A handle that is freed when dropped.
pub struct Cache(pub *mut qz1_kv_cache);

impl Cache {
    pub fn new(layout: &qz1_kv_layout, heads: &qz1_heads, max_tokens: usize) -> Self {
        let mut cache = null_mut();
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_kv_cache_new(layout, heads, max_tokens, &mut cache, null()) };
        assert_eq!(status, Ok);
        Self(cache)
    }

    pub fn append(&self, keys: &[f32], values: &[f32], parallel: *const qz1_parallel) -> qz1_status {
        let (k, v) = (keys.as_ptr(), values.as_ptr());
        // SAFETY: every pointer is null or points to a live value.
        unsafe { qz1_kv_cache_append(self.0, k, keys.len(), v, values.len(), parallel, null()) }
    }

    pub fn tokens(&self) -> usize {
        // SAFETY: the handle is live.
        unsafe { qz1_kv_cache_tokens(self.0) }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: made by `new` and freed once.
        unsafe { qz1_kv_cache_free(self.0) }
    }
}
