"""Rules over loops that Accelerate, Fabric, Lightning or a Trainer owns."""
