"""ATen: from Dynamo's graph to one functional graph, one op for each tensor."""
