//! Tests of the checkpoint stage.
