//! A cluster that computes the units of a job: nodes of different speed that are lost and replaced, one store whose
//! bandwidth they share, and a driver with the policy of `fewbits.ray`.
//!
//! An attempt reads its inputs, computes, and writes its result. Reads and writes that happen at the same time share the
//! bandwidth of the store equally, up to that of a node.

use crate::support::random::Random;

/// A unit.
#[derive(Debug, Clone, Default)]
pub struct Task {
    /// Its name.
    pub id: String,
    /// The units that must be finished first.
    pub needs: Vec<usize>,
    /// Seconds on a node of speed 1.
    pub seconds: f64,
    /// Bytes that are read.
    pub input_bytes: f64,
    /// Bytes that are written.
    pub output_bytes: f64,
}

/// The nodes, the store and the driver. Times are in seconds, bandwidths in bytes per second.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// The number of nodes.
    pub nodes: usize,
    /// The median speed of a node.
    pub speed: f64,
    /// The standard deviation of the logarithm of the speed.
    pub speed_deviation: f64,
    /// The bandwidth of a node.
    pub node_bandwidth: f64,
    /// The bandwidth of the store.
    pub store_bandwidth: f64,
    /// The mean time until a node is lost; infinite if none is.
    pub lifetime: f64,
    /// How long the driver takes to notice a lost node.
    pub detection: f64,
    /// How long it takes to replace a node.
    pub replacement: f64,
    /// How long a process takes to start and to open the job.
    pub start: f64,
    /// The share of finished units from which slow ones are started a second time; above 1, none is.
    pub duplicate_from: f64,
    /// What the driver adds to twice the median time before it starts a unit again.
    pub patience: f64,
}

/// What happened.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outcome {
    /// The time until all units were finished.
    pub seconds: f64,
    /// Attempts that were lost with their node.
    pub lost: usize,
    /// Units that were started a second time because they were slow.
    pub duplicates: usize,
    /// The share of the nodes' time in which they worked on attempts.
    pub busy: f64,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Starting { until: f64 },
    Reading { bytes: f64 },
    Computing { until: f64 },
    Writing { bytes: f64 },
}

#[derive(Debug, Clone, Copy)]
struct Attempt {
    task: usize,
    started: f64,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    speed: f64,
    /// When it is lost.
    end: f64,
    /// When it is replaced, if it was lost.
    back: Option<f64>,
    attempt: Option<Attempt>,
}

struct Run<'a> {
    tasks: &'a [Task],
    cluster: &'a Cluster,
    random: Random,
    now: f64,
    nodes: Vec<Node>,
    /// Ready units, the shortest first.
    ready: Vec<usize>,
    /// Lost units, and when the driver notices.
    unnoticed: Vec<(f64, usize)>,
    missing: Vec<usize>,
    followers: Vec<Vec<usize>>,
    done: Vec<bool>,
    /// The number of attempts that run, per unit.
    attempts: Vec<usize>,
    /// The times of finished units, sorted.
    taken: Vec<f64>,
    outcome: Outcome,
    busy: f64,
}

/// Simulates a job. The same seed gives the same outcome.
pub fn simulate(tasks: &[Task], cluster: &Cluster, seed: u64) -> Outcome {
    let mut random = Random(seed);
    let nodes = (0..cluster.nodes).map(|_| node(cluster, &mut random, 0.0)).collect();
    let mut followers = vec![Vec::new(); tasks.len()];
    for (index, task) in tasks.iter().enumerate() {
        task.needs.iter().for_each(|&need| followers[need].push(index));
    }
    let missing = tasks.iter().map(|task| task.needs.len()).collect();
    let mut run = Run {
        tasks,
        cluster,
        random,
        now: 0.0,
        nodes,
        ready: Vec::new(),
        unnoticed: Vec::new(),
        missing,
        followers,
        done: vec![false; tasks.len()],
        attempts: vec![0; tasks.len()],
        taken: Vec::new(),
        outcome: Outcome::default(),
        busy: 0.0,
    };
    for (index, task) in tasks.iter().enumerate() {
        if task.needs.is_empty() {
            run.add_ready(index);
        }
    }
    while run.taken.len() < tasks.len() {
        run.dispatch();
        run.step();
    }
    let total = run.now * cluster.nodes as f64;
    Outcome { seconds: run.now, busy: run.busy / total.max(f64::MIN_POSITIVE), ..run.outcome }
}

fn node(cluster: &Cluster, random: &mut Random, now: f64) -> Node {
    let speed = cluster.speed * (cluster.speed_deviation * random.normal()).exp();
    let end = match cluster.lifetime.is_finite() {
        true => now + random.exponential(cluster.lifetime),
        false => f64::INFINITY,
    };
    Node { speed, end, back: None, attempt: None }
}

impl Run<'_> {
    fn add_ready(&mut self, task: usize) {
        let seconds = |task: usize| self.tasks[task].seconds;
        let at = self.ready.partition_point(|&other| seconds(other) < seconds(task));
        self.ready.insert(at, task);
    }

    /// Starts attempts on idle nodes, the longest unit first.
    fn dispatch(&mut self) {
        let idle = |node: &Node| node.back.is_none() && node.attempt.is_none();
        for index in 0..self.nodes.len() {
            if !idle(&self.nodes[index]) {
                continue;
            }
            let next = loop {
                match self.ready.pop() {
                    Some(task) if self.done[task] => {}
                    Some(task) => break Some(task),
                    None => break self.slow(),
                }
            };
            let Some(task) = next else { return };
            self.attempts[task] += 1;
            let phase = Phase::Starting { until: self.now + self.cluster.start };
            self.nodes[index].attempt = Some(Attempt { task, started: self.now, phase });
        }
    }

    /// When the driver starts a unit a second time.
    fn too_long(&self) -> Option<f64> {
        let share = self.taken.len() as f64 / self.tasks.len() as f64;
        if share < self.cluster.duplicate_from || self.taken.is_empty() {
            return None;
        }
        Some(2.0 * self.taken[self.taken.len() / 2] + self.cluster.patience)
    }

    fn slow(&mut self) -> Option<usize> {
        let long = self.too_long()?;
        let mut running = self.nodes.iter().filter_map(|node| node.attempt);
        let is_slow = |attempt: &Attempt| {
            let once = self.attempts[attempt.task] == 1 && !self.done[attempt.task];
            once && self.now - attempt.started >= long
        };
        let slow = running.find(is_slow)?;
        self.outcome.duplicates += 1;
        Some(slow.task)
    }

    /// Bytes per second of each transfer.
    fn rate(&self) -> f64 {
        let transfers = self
            .nodes
            .iter()
            .filter_map(|node| node.attempt)
            .filter(|attempt| matches!(attempt.phase, Phase::Reading { .. } | Phase::Writing { .. }));
        let count = transfers.count().max(1);
        self.cluster.node_bandwidth.min(self.cluster.store_bandwidth / count as f64)
    }

    /// Advances to the next event.
    fn step(&mut self) {
        let rate = self.rate();
        let end = |attempt: &Attempt| match attempt.phase {
            Phase::Starting { until } | Phase::Computing { until } => until,
            Phase::Reading { bytes } | Phase::Writing { bytes } => self.now + bytes / rate,
        };
        let of_node = |node: &Node| match (node.back, &node.attempt) {
            (Some(back), _) => back,
            (None, Some(attempt)) => end(attempt).min(node.end),
            (None, None) => node.end,
        };
        let mut next = self.nodes.iter().map(of_node).fold(f64::INFINITY, f64::min);
        next = self.unnoticed.iter().map(|(at, _)| *at).fold(next, f64::min);
        if let Some(long) = self.too_long() {
            let due = |attempt: Attempt| attempt.started + long;
            let dues = self.nodes.iter().filter_map(|node| node.attempt).map(due);
            next = dues.filter(|due| *due > self.now).fold(next, f64::min);
        }
        let passed = next - self.now;
        self.now = next;
        for index in 0..self.nodes.len() {
            self.advance(index, passed, rate);
        }
        let (noticed, later) = self.unnoticed.drain(..).partition(|(at, _)| *at <= next);
        self.unnoticed = later;
        let noticed: Vec<(f64, usize)> = noticed;
        for (_, task) in noticed {
            if !self.done[task] {
                self.add_ready(task);
            }
        }
    }

    fn advance(&mut self, index: usize, passed: f64, rate: f64) {
        let mut own = self.nodes[index];
        if let Some(back) = own.back {
            if back <= self.now {
                self.nodes[index] = node(self.cluster, &mut self.random, self.now);
            }
            return;
        }
        if own.attempt.is_some() {
            self.busy += passed;
        }
        if own.end <= self.now {
            if let Some(attempt) = own.attempt.take() {
                self.outcome.lost += 1;
                self.attempts[attempt.task] -= 1;
                self.unnoticed.push((self.now + self.cluster.detection, attempt.task));
            }
            own.back = Some(self.now + self.cluster.replacement);
            self.nodes[index] = own;
            return;
        }
        let Some(mut attempt) = own.attempt else { return };
        let task = &self.tasks[attempt.task];
        // A transfer that ends now may have a rest of rounding errors. Its time can be too short to advance the clock.
        let rest = |bytes: f64| {
            let rest = bytes - passed * rate;
            (rest > 1e-6 * rate).then_some(rest)
        };
        let mut is_done = false;
        attempt.phase = match attempt.phase {
            Phase::Starting { until } if until <= self.now => Phase::Reading { bytes: task.input_bytes },
            Phase::Reading { bytes } => match rest(bytes) {
                Some(bytes) => Phase::Reading { bytes },
                None => Phase::Computing { until: self.now + task.seconds / own.speed },
            },
            Phase::Computing { until } if until <= self.now => Phase::Writing { bytes: task.output_bytes },
            Phase::Writing { bytes } => match rest(bytes) {
                Some(bytes) => Phase::Writing { bytes },
                None => {
                    is_done = true;
                    attempt.phase
                }
            },
            waiting => waiting,
        };
        self.nodes[index].attempt = (!is_done).then_some(attempt);
        self.attempts[attempt.task] -= usize::from(is_done);
        if is_done && !self.done[attempt.task] {
            self.done[attempt.task] = true;
            let seconds = self.now - attempt.started;
            self.taken.insert(self.taken.partition_point(|other| *other < seconds), seconds);
            for follower in self.followers[attempt.task].clone() {
                self.missing[follower] -= 1;
                if self.missing[follower] == 0 {
                    self.add_ready(follower);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(nodes: usize) -> Cluster {
        Cluster {
            nodes,
            speed: 1.0,
            speed_deviation: 0.0,
            node_bandwidth: 1e9,
            store_bandwidth: 1e12,
            lifetime: f64::INFINITY,
            detection: 30.0,
            replacement: 100.0,
            start: 0.0,
            duplicate_from: 2.0,
            patience: 10.0,
        }
    }

    fn tasks(seconds: &[f64]) -> Vec<Task> {
        seconds.iter().map(|&seconds| Task { seconds, ..Task::default() }).collect()
    }

    #[track_caller]
    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6 * expected, "{found}, expected {expected}");
    }

    #[test]
    fn units_are_packed_longest_first() {
        let tasks = tasks(&[1.0, 2.0, 3.0, 3.0, 1.0, 2.0]);
        for (nodes, expected) in [(1, 12.0), (2, 6.0), (3, 4.0), (6, 3.0), (100, 3.0)] {
            let outcome = simulate(&tasks, &cluster(nodes), 1);
            close(outcome.seconds, expected);
            close(outcome.busy, 12.0 / expected / nodes as f64);
        }
        let fast = Cluster { speed: 4.0, start: 0.5, ..cluster(1) };
        close(simulate(&tasks, &fast, 1).seconds, 12.0 / 4.0 + 6.0 * 0.5);
    }

    #[test]
    fn units_wait_for_those_that_they_need() {
        let mut tasks = tasks(&[5.0, 2.0, 1.0, 1.0]);
        tasks[2].needs = vec![0, 1];
        tasks[3].needs = vec![2];
        close(simulate(&tasks, &cluster(8), 1).seconds, 7.0);
    }

    #[test]
    fn transfers_share_the_store() {
        let mut tasks = tasks(&[1.0; 4]);
        for task in &mut tasks {
            (task.input_bytes, task.output_bytes) = (2e9, 1e9);
        }
        // A node alone is limited by its own bandwidth.
        close(simulate(&tasks[..1], &cluster(1), 1).seconds, 4.0);
        close(simulate(&tasks, &cluster(4), 1).seconds, 4.0);
        let slow = Cluster { store_bandwidth: 1e9, ..cluster(4) };
        close(simulate(&tasks, &slow, 1).seconds, 4.0 * 2.0 + 1.0 + 4.0);
    }

    /// Late in a long job, the clock is too coarse for the last bytes of a transfer.
    #[test]
    fn every_simulation_ends() {
        let mut tasks = tasks(&[3000.0 / 7.0; 200]);
        for (index, task) in tasks.iter_mut().enumerate() {
            (task.input_bytes, task.output_bytes) = (1e9 / 3.0 + index as f64, 1e8 / 7.0);
        }
        let busy = Cluster { store_bandwidth: 3e9, lifetime: 20_000.0, speed_deviation: 0.25, ..cluster(3) };
        for seed in 0..100 {
            assert!(simulate(&tasks, &busy, seed).seconds > 20_000.0);
        }
    }

    #[test]
    fn lost_nodes_cost_their_unit_and_the_time_until_that_is_noticed() {
        let tasks = tasks(&[50.0; 40]);
        let whole = simulate(&tasks, &cluster(4), 1).seconds;
        let unstable = Cluster { lifetime: 300.0, ..cluster(4) };
        let outcome = simulate(&tasks, &unstable, 1);
        assert!(outcome.lost > 2 && outcome.seconds > 1.1 * whole, "{outcome:?}");
        assert_eq!(simulate(&tasks, &unstable, 1), outcome);
        assert_ne!(simulate(&tasks, &unstable, 2), outcome);
        let never_noticed = Cluster { detection: 1e6, ..unstable };
        assert!(simulate(&tasks, &never_noticed, 1).seconds > 1e6);
    }

    #[test]
    fn slow_units_are_started_again() {
        let tasks = tasks(&[10.0; 60]);
        let uneven = Cluster { speed_deviation: 1.0, ..cluster(20) };
        let patient: f64 = (0..20).map(|seed| simulate(&tasks, &uneven, seed).seconds).sum();
        let duplicating = Cluster { duplicate_from: 0.9, ..uneven };
        let outcomes: Vec<Outcome> = (0..20).map(|seed| simulate(&tasks, &duplicating, seed)).collect();
        let impatient: f64 = outcomes.iter().map(|outcome| outcome.seconds).sum();
        assert!(outcomes.iter().any(|outcome| outcome.duplicates > 0));
        assert!(impatient < 0.9 * patient, "{impatient} and {patient}");
    }
}
