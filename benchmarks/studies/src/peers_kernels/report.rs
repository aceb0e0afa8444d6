//! The measurements, as stored rows and as formatted tables.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use xtask::support::measure::median;
use xtask::support::record::table;

use super::worker::Limits;

const OURS: &str = "ours";
/// Up to this many tokens, products are limited by memory bandwidth.
const FEW_TOKENS: usize = 4;

/// Pairs of contestants whose rates are compared for FP4 weights.
const FP4: [[&str; 2]; 4] = [
    ["ours wf4a8-g32-mx", "ours w4a8-g32"],
    ["ours wf4a8-g16-nv", "ours w4a8-g32"],
    ["ours wf4a8-g32-mx", "ggml MXFP4"],
    ["ours wf4a8-g16-nv", "ggml NVFP4"],
];

/// quant's kernels for types of GGUF, and those of ggml.
const GGUF: [[&str; 2]; 5] = [
    ["ours q4_k", "ggml Q4_K"],
    ["ours q5_k", "ggml Q5_K"],
    ["ours q6_k", "ggml Q6_K"],
    ["ours iq4_xs", "ggml IQ4_XS"],
    ["ours iq4_nl", "ggml IQ4_NL"],
];

/// One turn of a contestant.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    pub threads: usize,
    pub shape: [usize; 2],
    pub tokens: usize,
    pub round: usize,
    pub peer: String,
    pub contestant: String,
    /// Bytes of the packed weights.
    pub bytes: usize,
    /// The number of passes; `seconds` is their median.
    pub products: usize,
    pub seconds: f64,
    /// The machine's limits in this round.
    pub limits: Limits,
}

const HEADER: &str =
    "threads,n,k,tokens,round,peer,contestant,bytes,passes,seconds,memory_gb_per_second,dot_tops";

impl Turn {
    fn line(&self) -> String {
        let Self { threads, shape: [n, k], tokens, round, peer, contestant, .. } = self;
        let Limits { memory, tops } = self.limits;
        format!(
            "{threads},{n},{k},{tokens},{round},{peer},{contestant},{},{},{:.9},{memory:.2},{tops:.3}",
            self.bytes, self.products, self.seconds
        )
    }

    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(',').collect();
        let whole = |i: usize| words.get(i)?.parse::<usize>().ok();
        let number = |i: usize| words.get(i)?.parse::<f64>().ok();
        Some(Self {
            threads: whole(0)?,
            shape: [whole(1)?, whole(2)?],
            tokens: whole(3)?,
            round: whole(4)?,
            peer: (*words.get(5)?).to_owned(),
            contestant: (*words.get(6)?).to_owned(),
            bytes: whole(7)?,
            products: whole(8)?,
            seconds: number(9)?,
            limits: Limits { memory: number(10)?, tops: number(11)? },
        })
    }

    fn who(&self) -> String {
        format!("{} {}", self.peer, self.contestant)
    }

    fn bits(&self) -> f64 {
        8.0 * self.bytes as f64 / (self.shape[0] * self.shape[1]) as f64
    }

    /// Rates in GB/s, and in 10¹² operations per second.
    fn rates(&self) -> [f64; 2] {
        let operations = 2.0 * (self.shape[0] * self.shape[1] * self.tokens) as f64;
        [self.bytes as f64 / self.seconds / 1e9, operations / self.seconds / 1e12]
    }
}

/// All turns, and the participants.
#[derive(Debug, Default)]
pub struct Measured {
    pub turns: Vec<Turn>,
    /// Names with versions.
    pub versions: Vec<String>,
    /// Maximum bytes of all copies of a matrix that a contestant keeps.
    pub rotated: usize,
    notes: BTreeMap<String, String>,
    /// Peers that failed, with their errors.
    left_out: Vec<String>,
}

impl Measured {
    /// Keeps a worker's note about a contestant.
    pub fn note(&mut self, peer: &str, contestant: &str, note: &str) {
        if !note.is_empty() {
            self.notes.insert(format!("{peer} {contestant}"), note.to_owned());
        }
    }

    /// Records that a peer failed; its turns with this number of threads are dropped.
    pub fn leave_out(&mut self, threads: usize, peer: &str, why: &str) {
        self.turns.retain(|t| (t.threads, t.peer.as_str()) != (threads, peer));
        let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
        self.left_out.push(format!("{peer}, {threads} thread(s): {why}"));
    }

    /// Adds the cases of earlier runs of the same commit that this run did not measure, and stores all of them.
    pub fn keep(&mut self, path: &Path) -> Result<()> {
        let earlier = std::fs::read_to_string(path).unwrap_or_default();
        let case = |t: &Turn| (t.threads, t.shape, t.tokens, t.who());
        let now: std::collections::BTreeSet<_> = self.turns.iter().map(case).collect();
        self.turns.extend(earlier.lines().filter_map(Turn::parse).filter(|t| !now.contains(&case(t))));
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, self.csv().join("\n") + "\n")
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// The measurements of every turn, as CSV.
    pub fn csv(&self) -> Vec<String> {
        std::iter::once(HEADER.to_owned()).chain(self.turns.iter().map(Turn::line)).collect()
    }

    /// The page of the record.
    pub fn page(&self, notes: &str) -> String {
        let mut page = format!("Versions: {}.\n\n{notes}\n", self.versions.join("; "));
        for (who, note) in &self.notes {
            page += &format!("- {who}: {note}\n");
        }
        for who in &self.left_out {
            page += &format!("- skipped: {who}\n");
        }
        page += &format!("\n{}", self.comparison());
        for threads in self.threads() {
            for shape in self.shapes(threads) {
                page += &format!("\n{}", self.page_of(threads, shape));
            }
        }
        page
    }

    fn threads(&self) -> Vec<usize> {
        distinct(self.turns.iter().map(|t| t.threads))
    }

    fn shapes(&self, threads: usize) -> Vec<[usize; 2]> {
        distinct(self.turns.iter().filter(|t| t.threads == threads).map(|t| t.shape))
    }

    /// All contestants at one shape.
    pub fn page_of(&self, threads: usize, shape: [usize; 2]) -> String {
        let turns: Vec<&Turn> =
            self.turns.iter().filter(|t| t.threads == threads && t.shape == shape).collect();
        let tokens = distinct(turns.iter().map(|t| t.tokens));
        let mut names: Vec<String> = Vec::new();
        for turn in &turns {
            if !names.contains(&turn.who()) {
                names.push(turn.who());
            }
        }
        names.sort_by_key(|name| !name.starts_with(OURS));
        let rows: Vec<Vec<String>> = names
            .iter()
            .map(|name| {
                let of: Vec<&&Turn> = turns.iter().filter(|t| t.who() == *name).collect();
                let mut row = vec![name.clone(), format!("{:.2}", of.first().map_or(f64::NAN, |t| t.bits()))];
                row.extend(tokens.iter().map(|m| {
                    let at = || of.iter().filter(|t| t.tokens == *m);
                    let [bytes, operations] = [0, 1].map(|i| median(at().map(|t| t.rates()[i])));
                    let of_memory = median(at().map(|t| t.rates()[0] / t.limits.memory));
                    let of_dots = median(at().map(|t| t.rates()[1] / t.limits.tops));
                    match *m <= FEW_TOKENS {
                        true => format!("{bytes:.1} GB/s, {:.0} %", 100.0 * of_memory),
                        false => format!("{operations:.2} TOPS, {:.0} %", 100.0 * of_dots),
                    }
                }));
                row
            })
            .collect();
        let mut header = vec!["kernel".to_owned(), "bits".to_owned()];
        header.extend(tokens.iter().map(|m| format!("{m} token(s)")));
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        format!(
            "### {threads} thread(s), {} × {}\n\nMemory {:.1} GB/s, dot products {:.2} TOPS, medians of rounds.\n\n{}",
            shape[0],
            shape[1],
            median(turns.iter().map(|t| t.limits.memory)),
            median(turns.iter().map(|t| t.limits.tops)),
            table(&header, &rows)
        )
    }

    /// Speedup of each of quant's contestants over the fastest peer of its kind, round by round.
    pub fn comparison(&self) -> String {
        let mut page = String::new();
        for threads in self.threads() {
            let tokens = distinct(self.turns.iter().filter(|t| t.threads == threads).map(|t| t.tokens));
            let mut rows = Vec::new();
            for shape in self.shapes(threads) {
                for ours in ["w4a8-g128", "w4a8-g32", "w4a16-g128", "w8a8-channel"] {
                    let mut row = vec![format!("{} × {}", shape[0], shape[1]), ours.to_owned()];
                    row.extend(tokens.iter().map(|m| {
                        let at = |t: &&Turn| t.threads == threads && t.shape == shape && t.tokens == *m;
                        let turns: Vec<&Turn> = self.turns.iter().filter(at).collect();
                        best(&turns, ours).unwrap_or_default()
                    }));
                    if row[2..].iter().any(|cell| !cell.is_empty()) {
                        rows.push(row);
                    }
                }
            }
            let mut header = vec!["n × k".to_owned(), "ours".to_owned()];
            header.extend(tokens.iter().map(|m| format!("{m} token(s)")));
            let header: Vec<&str> = header.iter().map(String::as_str).collect();
            page += &format!(
                "### {threads} thread(s): speed relative to the fastest peer with the same number of bits\n\n{}\n",
                table(&header, &rows)
            );
            let by_work = |t: &Turn, m: usize| t.rates()[usize::from(m > FEW_TOKENS)];
            let fp4 = format!("FP4, relative speed, in bytes up to {FEW_TOKENS} tokens");
            page += &self.pairs(threads, &tokens, &FP4, &fp4, by_work);
            let by_time = |t: &Turn, _| 1.0 / t.seconds;
            page += &self.pairs(threads, &tokens, &GGUF, "types of GGUF, relative speed", by_time);
        }
        page
    }

    /// Returns a table of contestants compared with others: the median of the rounds' ratios of a rate, at each number
    /// of tokens.
    fn pairs(
        &self,
        threads: usize,
        tokens: &[usize],
        pairs: &[[&'static str; 2]],
        title: &str,
        rate: impl Fn(&Turn, usize) -> f64,
    ) -> String {
        let mut rows = Vec::new();
        for shape in self.shapes(threads) {
            for &[one, other] in pairs {
                let ratios = |m: usize| {
                    let at = |who: &'static str| {
                        let is = move |t: &&Turn| {
                            (t.threads, t.shape, t.tokens) == (threads, shape, m) && t.who() == who
                        };
                        self.turns.iter().filter(is)
                    };
                    let pairs =
                        at(one).flat_map(|a| at(other).filter(|b| b.round == a.round).map(move |b| (a, b)));
                    pairs.map(|(a, b)| rate(a, m) / rate(b, m)).collect::<Vec<f64>>()
                };
                let all: Vec<Vec<f64>> = tokens.iter().map(|m| ratios(*m)).collect();
                if all.iter().any(|ratios| !ratios.is_empty()) {
                    let mut row =
                        vec![format!("{} × {}", shape[0], shape[1]), one.to_owned(), other.to_owned()];
                    row.extend(
                        all.into_iter()
                            .map(|r| if r.is_empty() { String::new() } else { format!("{:.2}", median(r)) }),
                    );
                    rows.push(row);
                }
            }
        }
        if rows.is_empty() {
            return String::new();
        }
        let mut header = vec!["n × k".to_owned(), "kernel".to_owned(), "compared with".to_owned()];
        header.extend(tokens.iter().map(|m| format!("{m} token(s)")));
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        format!("### {threads} thread(s): {title}\n\n{}\n", table(&header, &rows))
    }
}

/// quant against the fastest peer with a similar number of bits: both have more than 6 bits per weight, or neither has.
fn best(turns: &[&Turn], ours: &str) -> Option<String> {
    let wide = |t: &Turn| t.bits() > 6.0;
    let mine: Vec<&&Turn> = turns.iter().filter(|t| t.peer == OURS && t.contestant == ours).collect();
    let first = mine.first()?;
    let mut peers: BTreeMap<String, Vec<(usize, f64)>> = BTreeMap::new();
    for turn in turns.iter().filter(|t| t.peer != OURS && wide(t) == wide(first)) {
        peers.entry(turn.who()).or_default().push((turn.round, turn.seconds));
    }
    let seconds = |of: &[(usize, f64)]| median(of.iter().map(|(_, s)| *s));
    let (name, theirs) = peers.into_iter().min_by(|a, b| seconds(&a.1).total_cmp(&seconds(&b.1)))?;
    let ratios = mine.iter().flat_map(|t| {
        theirs.iter().filter(|(round, _)| *round == t.round).map(|(_, seconds)| seconds / t.seconds)
    });
    Some(format!("{:.2} ({name})", median(ratios)))
}

fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(peer: &str, contestant: &str, round: usize, seconds: f64) -> Turn {
        Turn {
            threads: 1,
            shape: [256, 256],
            tokens: 1,
            round,
            peer: peer.into(),
            contestant: contestant.into(),
            bytes: 256 * 128,
            products: 3,
            seconds,
            limits: Limits { memory: 40.0, tops: 1.0 },
        }
    }

    #[test]
    fn ratios_are_of_the_fastest_peer_round_by_round() {
        let turns = [
            turn(OURS, "w4a8-g128", 0, 1.0),
            turn(OURS, "w4a8-g128", 1, 2.0),
            turn("a", "q", 0, 2.0),
            turn("a", "q", 1, 4.0),
            turn("b", "q", 0, 9.0),
            turn("b", "q", 1, 9.0),
        ];
        let turns: Vec<&Turn> = turns.iter().collect();
        assert_eq!(best(&turns, "w4a8-g128").as_deref(), Some("2.00 (a q)"));
        assert_eq!(best(&turns, "w8a8-channel"), None);
    }

    #[test]
    fn fp4_is_compared_in_bytes_and_in_products() {
        let mut narrow = turn(OURS, "wf4a8-g32-mx", 0, 1.0);
        narrow.bytes /= 2;
        let turns = vec![narrow, turn(OURS, "w4a8-g32", 0, 1.0), turn("ggml", "MXFP4", 0, 3.0)];
        let few = Measured { turns: turns.clone(), ..Measured::default() }.comparison();
        assert!(few.contains("| ours wf4a8-g32-mx | ours w4a8-g32 | 0.50 |"), "{few}");
        assert!(few.contains("| ours wf4a8-g32-mx | ggml MXFP4 | 1.50 |"), "{few}");
        let turns = turns.into_iter().map(|t| Turn { tokens: 16, ..t }).collect();
        let many = Measured { turns, ..Measured::default() }.comparison();
        assert!(many.contains("| ours wf4a8-g32-mx | ours w4a8-g32 | 1.00 |"), "{many}");
        assert!(!many.contains("wf4a8-g16-nv"), "{many}");
    }

    #[test]
    fn types_of_gguf_are_compared_in_time() {
        let mut wide = turn(OURS, "q4_k", 0, 1.0);
        wide.bytes *= 2;
        let turns = vec![wide, turn("ggml", "Q4_K", 0, 1.5), turn("ggml", "Q4_K", 1, 9.0)];
        let page = Measured { turns, ..Measured::default() }.comparison();
        assert!(page.contains("| ours q4_k | ggml Q4_K | 1.50 |"), "{page}");
    }

    #[test]
    fn parts_of_a_run_are_put_together_and_later_ones_win() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept/turns.csv");
        let mut first =
            Measured { turns: vec![turn("a", "q", 0, 1.0), turn("b", "q", 0, 1.0)], ..Measured::default() };
        first.keep(&path).unwrap();
        let mut second = Measured { turns: vec![turn("a", "q", 0, 2.0)], ..Measured::default() };
        second.keep(&path).unwrap();
        assert_eq!(second.turns, [turn("a", "q", 0, 2.0), turn("b", "q", 0, 1.0)]);
        assert!(second.page("notes").contains("| b q | 4.00 |"), "{}", second.page("notes"));
    }
}
