//! The computation, and its flame graph.

use std::collections::BTreeMap;
use std::hint::black_box;

use crate::{Error, Event, Sampler};

const PERIOD: u64 = 100_000;

/// A function with its name.
type Named = (&'static str, fn(u64) -> u64);

/// The functions that the graph names. Code belongs to the one that begins last before it.
const FUNCTIONS: [Named; 4] = [("work", work), ("primes", primes), ("collatz", collatz), ("steps", steps)];

/// Samples the computation, and prints the graph.
pub fn print() -> Result<(), Error> {
    let mut sampler = Sampler::new(Event::INSTRUCTIONS, PERIOD, 10_000)?;
    let (stacks, result) = sampler.sample(|| work(black_box(60_000)))?;
    let mut root = Node::default();
    for stack in &stacks {
        // The innermost function comes first. A caller's address is the instruction behind its call.
        let calls = stack.iter().enumerate().map(|(depth, address)| name(address - u64::from(depth > 0)));
        root.add(calls.collect::<Vec<_>>().into_iter().rev().skip_while(|name| *name != FUNCTIONS[0].0));
    }
    println!("{} samples, one each {PERIOD} instructions; the result is {result}", stacks.len());
    root.print(root.samples, 0);
    Ok(())
}

const OTHERS: &str = "(others)";

/// Returns the name of the function that has this address.
fn name(address: u64) -> &'static str {
    /// No function is longer.
    const LONGEST: u64 = 1024;
    let start = |function: fn(u64) -> u64| function as *const () as u64;
    let known = FUNCTIONS
        .iter()
        .filter(|(_, function)| (start(*function)..start(*function) + LONGEST).contains(&address));
    known.max_by_key(|(_, function)| start(*function)).map_or(OTHERS, |(name, _)| name)
}

/// A function in the graph, with what it has called.
#[derive(Default)]
struct Node {
    samples: u64,
    calls: BTreeMap<&'static str, Node>,
}

impl Node {
    fn add(&mut self, mut calls: impl Iterator<Item = &'static str>) {
        self.samples += 1;
        if let Some(name) = calls.next() {
            self.calls.entry(name).or_default().add(calls);
        }
    }

    fn print(&self, all: u64, depth: usize) {
        const WIDTH: u64 = 40;
        let mut calls: Vec<_> = self.calls.iter().collect();
        calls.sort_by_key(|(_, node)| std::cmp::Reverse(node.samples));
        for (name, node) in calls {
            let bar = "#".repeat(usize::try_from((node.samples * WIDTH).div_ceil(all)).unwrap_or(0));
            let name = format!("{}{name}", "  ".repeat(depth));
            println!("{:>5.1} % {name:<20} {bar}", percent(node.samples, all));
            node.print(all, depth + 1);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "there are a few thousand samples")]
fn percent(samples: u64, all: u64) -> f64 {
    samples as f64 * 100.0 / all as f64
}

#[inline(never)]
fn work(up_to: u64) -> u64 {
    black_box(primes(up_to)) + black_box(collatz(up_to))
}

/// Counts the primes below a number.
#[inline(never)]
fn primes(up_to: u64) -> u64 {
    let is_prime = |number: &u64| (2..=number.isqrt()).all(|divisor| !number.is_multiple_of(divisor));
    (2..up_to).filter(is_prime).count() as u64
}

/// Returns the most steps to 1 of the numbers below a number.
#[inline(never)]
fn collatz(up_to: u64) -> u64 {
    (1..up_to).map(|number| black_box(steps(number))).max().unwrap_or(0)
}

#[inline(never)]
fn steps(mut number: u64) -> u64 {
    let mut steps = 0;
    while number != 1 {
        number = if number.is_multiple_of(2) { number / 2 } else { 3 * number + 1 };
        steps += 1;
    }
    steps
}
