//! Appends tokens to the pages of lists.

use std::sync::{Mutex, PoisonError};

use super::grid::check_values;
use super::layout::{KvLayout, PAGE_TOKENS};
use super::list::PageList;
use crate::parallel::Disjoint;
use crate::{KernelError, Parallel};

/// Up to this number of pages, checking for duplicates needs no allocation.
const INLINE_PAGES: usize = 64;

impl KvLayout {
    /// Appends `m` tokens to each list, one list per key-value head. `keys` and `values` are `[m, lists, head_dim]`;
    /// `bytes` are whole pages, numbered from 0. Lists must already contain the pages for the new tokens; their `first`
    /// and `seen` are ignored.
    ///
    /// # Errors
    /// When a length or a list does not match, a page to be written has an invalid number or occurs twice, a value is
    /// NaN or exceeds 65504 in magnitude, or memory allocation fails. On error, nothing is written.
    pub fn append(
        &self,
        bytes: &mut [u8],
        lists: &[PageList<'_>],
        keys: &[f32],
        values: &[f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let kv = lists.len();
        if kv == 0 {
            return Err(KernelError::Mismatch {
                what: "the number of key-value heads must be at least",
                expected: 1,
                got: 0,
            });
        }
        let width = kv.checked_mul(self.head_dim()).ok_or(KernelError::TooLarge("the number of heads"))?;
        let m = KernelError::parts("keys", width, keys.len())?;
        KernelError::length("values", keys.len(), values.len())?;
        let there = KernelError::parts("pages", self.page_bytes(), bytes.len())?;
        check_values(keys)?;
        check_values(values)?;
        if m == 0 {
            return Ok(());
        }
        let mut count = 0_usize;
        for list in lists {
            let written = written(list, m)?;
            if let Some(&page) = written.iter().find(|&&page| page as usize >= there) {
                let (expected, got) = (there, page as usize);
                let what = "page numbers must be less than the number of pages,";
                return Err(KernelError::Mismatch { what, expected, got });
            }
            count += written.len();
        }
        require_distinct(lists, m, count)?;
        let place = |head: usize, i: usize| {
            let at = lists[head].tokens + i;
            (lists[head].pages[at / PAGE_TOKENS] as usize, at % PAGE_TOKENS)
        };
        // SAFETY: two heads write to different pages, since `require_distinct` checked that no page to be written
        // occurs twice.
        unsafe { self.write_all(bytes, kv, m, &place, keys, values, parallel) }
    }

    /// Writes `m` tokens of `kv` heads. `place` returns the page and slot of a head and a token; both must exist.
    ///
    /// # Safety
    /// `place` must not return the same page for two heads.
    #[allow(clippy::too_many_arguments, reason = "nothing here is kept between calls")]
    pub(super) unsafe fn write_all(
        &self,
        bytes: &mut [u8],
        kv: usize,
        m: usize,
        place: &(dyn Fn(usize, usize) -> (usize, usize) + Sync),
        keys: &[f32],
        values: &[f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let (d, size) = (self.head_dim(), self.page_bytes());
        let bytes = Disjoint::new(bytes);
        let refused = Mutex::new(None);
        parallel.for_each(kv, &|head| {
            for i in (0..m).filter(|_| head < kv) {
                let (page, slot) = place(head, i);
                // SAFETY: `Parallel` calls each head at most once, and the caller guarantees that no other head has the
                // same pages.
                let page = unsafe { bytes.part(page * size..(page + 1) * size) };
                let at = (i * kv + head) * d;
                if let Err(error) = self.write(page, slot, &keys[at..at + d], &values[at..at + d]) {
                    *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
            }
        });
        refused.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// Returns the pages of a list to which `m` new tokens are written.
fn written<'a>(list: &PageList<'a>, m: usize) -> Result<&'a [u32], KernelError> {
    let after = list.tokens.checked_add(m).ok_or(KernelError::TooLarge("the number of tokens"))?;
    let (first, needed) = (list.tokens / PAGE_TOKENS, after.div_ceil(PAGE_TOKENS));
    let got = list.pages.len();
    let short = KernelError::Mismatch {
        what: "the number of pages in a list must be at least",
        expected: needed,
        got,
    };
    list.pages.get(first..needed).ok_or(short)
}

fn require_distinct(lists: &[PageList<'_>], m: usize, count: usize) -> Result<(), KernelError> {
    let mut few = [0; INLINE_PAGES];
    let mut many = Vec::new();
    let named = match few.get_mut(..count) {
        Some(few) => few,
        None => {
            many.try_reserve_exact(count).map_err(|_| KernelError::Memory("the page numbers"))?;
            many.resize(count, 0);
            &mut many[..]
        }
    };
    let mut at = 0;
    for list in lists {
        let pages = written(list, m)?;
        named[at..at + pages.len()].copy_from_slice(pages);
        at += pages.len();
    }
    named.sort_unstable();
    match named.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(_) => Err(KernelError::Mismatch {
            what: "the number of lists that write to the same page must be at most",
            expected: 1,
            got: 2,
        }),
        None => Ok(()),
    }
}
