//! Every invalid call that can be detected gives a status and writes nothing.

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
