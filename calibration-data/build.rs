//! Detects whether the demo model's weights are present; they exceed the size limit of a published crate.

fn main() {
    const WEIGHTS: &str = "demo-model/model.safetensors";
    println!("cargo::rerun-if-changed={WEIGHTS}");
    println!("cargo::rustc-check-cfg=cfg(demo_model)");
    if std::path::Path::new(WEIGHTS).is_file() {
        println!("cargo::rustc-cfg=demo_model");
    }
}
