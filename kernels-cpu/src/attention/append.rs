//! Tokens are appended to the pages that lists name.

use std::sync::{Mutex, PoisonError};

use super::grid::check_values;
use super::layout::{KvLayout, PAGE_TOKENS};
use super::list::PageList;
use crate::parallel::Disjoint;
use crate::{KernelError, Parallel};

/// Pages whose numbers are compared without allocating.
const FEW: usize = 64;

impl KvLayout {
    /// Appends `m` tokens behind those of each list, one list a key-value head: `keys` and `values` are
    /// `[m, lists, head_dim]`, `bytes` whole pages, numbered from 0. Lists name pages for the new tokens too; what
    /// queries would see of them does not matter. Heads are pieces of work.
    ///
    /// # Errors
    /// When a length is wrong, a list is too short or names a page that is not there, a page that is written
    /// is named twice, or a value is beyond ±65504. Nothing is written then.
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
            return Err(KernelError::Mismatch { what: "key-value heads", expected: 1, got: 0 });
        }
        let width = kv.checked_mul(self.head_dim()).ok_or(KernelError::TooLarge("the number of heads"))?;
        let m = keys.len() / width;
        KernelError::length("keys", m * width, keys.len())?;
        KernelError::length("values", keys.len(), values.len())?;
        let there = bytes.len() / self.page_bytes();
        KernelError::length("pages", there * self.page_bytes(), bytes.len())?;
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
                return Err(KernelError::Mismatch { what: "a page's number", expected, got });
            }
            count += written.len();
        }
        apart(lists, m, count)?;
        let place = |head: usize, i: usize| {
            let at = lists[head].tokens + i;
            (lists[head].pages[at / PAGE_TOKENS] as usize, at % PAGE_TOKENS)
        };
        // SAFETY: places of two heads are on two pages, for those that are written are named once.
        unsafe { self.write_all(bytes, kv, m, &place, keys, values, parallel) }
    }

    /// Writes `m` tokens of `kv` heads, of which `place` says the page and the slot, and that are known to fit.
    ///
    /// # Safety
    /// No two heads may have the same page.
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
                // SAFETY: each head is asked for once, and its pages are its own.
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

/// The pages of a list that so many new tokens go to.
fn written<'a>(list: &PageList<'a>, m: usize) -> Result<&'a [u32], KernelError> {
    let after = list.tokens.checked_add(m).ok_or(KernelError::TooLarge("the number of tokens"))?;
    let (first, needed) = (list.tokens / PAGE_TOKENS, after.div_ceil(PAGE_TOKENS));
    let got = list.pages.len();
    let short = KernelError::Mismatch { what: "pages of a list", expected: needed, got };
    list.pages.get(first..needed).ok_or(short)
}

/// Whether no page of the `count` that are written is named twice.
fn apart(lists: &[PageList<'_>], m: usize, count: usize) -> Result<(), KernelError> {
    let mut few = [0; FEW];
    let mut many = Vec::new();
    let named = match few.get_mut(..count) {
        Some(few) => few,
        None => {
            many.try_reserve_exact(count).map_err(|_| KernelError::Memory("the numbers of pages"))?;
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
        Some(twice) => Err(KernelError::Mismatch {
            what: "lists that write the same page",
            expected: 1,
            got: twice[0] as usize,
        }),
        None => Ok(()),
    }
}
