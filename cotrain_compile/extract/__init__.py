"""Extract: StepGraph -> Dataflow. The last package that sees an `fx.Node` on the way down."""
