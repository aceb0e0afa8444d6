//! Every way to call the interface wrongly that it can see is a status, and writes nothing.

mod activations;
mod attention;
mod caches;
mod experts;
mod messages;
mod overlaps;
mod pages;
mod products;
mod random;
mod structures;
mod weights;
